"""Verbs about batch systems, and what batch systems call."""
