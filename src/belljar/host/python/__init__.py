"""The Python of this host, for guests that have none."""
