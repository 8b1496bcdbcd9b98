"""Verbs of factories and accounting."""
