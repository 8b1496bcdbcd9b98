"""belljar runs every batch job in its own fresh virtual machine."""

from belljar import modules

__version__ = "0.1.0"
modules.use()
