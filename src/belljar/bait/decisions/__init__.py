"""What a bait decides: pure, from what was written down and what is seen."""
