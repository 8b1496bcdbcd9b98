"""`belljar lease serve`: what is written down becomes so. It may be killed at any moment: it goes on from what it sees."""
