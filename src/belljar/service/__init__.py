"""What a program that runs on its own does beside its work: what it keeps, tells and measures, and whom it obeys."""
