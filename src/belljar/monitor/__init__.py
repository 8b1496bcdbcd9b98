"""The door of monitoring: what happened to machines, read from ledgers, on one node or on many.

Readers only: nothing here asks a machine, its keeper or a daemon for anything, and nothing here is on the way of a job.

Outcomes     the reader of ledgers that all others stand on        outcomes.py
"""
