"""`belljar pilot FILE`: the job that the batch system starts on each node of a lease. It says what it was granted, makes machines as it is
told, and ends them by its own clock, whether its service lives or not.

    granted.py    what this node gives it
    journal.py    what it was told, and what it said, on this node's disk
    link.py       its connection to the service
    machines.py   its machines, by belljar's own door
    pilot.py      from its start to its end
    start.py      the process: signals, exit codes
"""
