"""OpenPBS from outside."""
