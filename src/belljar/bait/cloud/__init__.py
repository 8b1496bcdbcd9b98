"""Slurm's own way to nodes on demand: CLOUD nodes, and the hosts on which they are made."""
