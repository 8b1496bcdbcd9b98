"""One host's factory: its machines, what it remembers, what it tells."""
