"""A program under a filter of its system calls: what it asks of the network is decided outside."""
