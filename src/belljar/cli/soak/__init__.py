"""The stability run."""
