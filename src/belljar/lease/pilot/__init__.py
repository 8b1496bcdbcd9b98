"""`belljar pilot FILE`: the job that the batch system starts on each node of a lease. It says what it was granted, makes machines as it is
told, and ends them by its own clock, whether its service lives or not.

    link.py       its connection to the service; what it was told and said is in a journal
    machines.py   its machines, by belljar's own door
    pilot.py      from its start to its end
    start.py      the process: its signals, and what this node gives it
"""
