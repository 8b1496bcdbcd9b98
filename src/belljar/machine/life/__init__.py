"""A machine while it lives, from the claim to the outcome."""
