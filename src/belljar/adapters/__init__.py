"""Doors for other people's frameworks, one file each, over `belljar.api` alone. Each is imported only where its framework is there."""
