"""What a site puts in place for a batch system, put there and taken out again. Knows no batch system."""
