"""Slurm from outside, 22.05 and later."""
