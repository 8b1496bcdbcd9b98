"""OpenPBS."""
