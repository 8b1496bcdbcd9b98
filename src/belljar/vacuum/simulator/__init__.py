"""A space under a clock of its own, and what becomes of its shares."""
