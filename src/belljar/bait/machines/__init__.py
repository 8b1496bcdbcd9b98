"""What a bait has made: its machines, and what is done in one between two jobs."""
