"""Verbs about machines."""
