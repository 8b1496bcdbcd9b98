"""`python -m belljar`."""

from belljar.cli import entry

entry()
