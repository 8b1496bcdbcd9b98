"""What becomes of a lease, decided by values alone: `now` is handed in, nothing is read or written. `advance` and `reports` are where
to begin: what is seen, and what a pilot says."""
