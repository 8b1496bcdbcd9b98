"""`python3 -m belljar`."""

from belljar.cli import entry

if __name__ == "__main__":
    entry()
