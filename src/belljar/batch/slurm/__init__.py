"""Slurm, 22.05 and later."""

from belljar.batch import System

SYSTEM = System(__name__, "Slurm", node_variable="SLURMD_NODENAME")
