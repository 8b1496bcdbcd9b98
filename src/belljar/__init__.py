"""belljar runs every batch job in its own fresh virtual machine."""

__version__ = "0.1.0"
