"""Verbs about this host."""
