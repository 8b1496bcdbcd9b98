"""`belljar lease serve`: what is written down becomes so. It may be killed at any moment: it goes on from what it sees.

channel.py   the pilots' connections
jobs.py      the batch system: submit, cancel, one question about all
daemon.py    looks, decides, writes, acts
door.py      what owners on this host ask, by a unix socket
start.py     the process
"""
