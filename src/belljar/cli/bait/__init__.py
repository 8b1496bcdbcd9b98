"""`belljar bait ...` and `belljar node ...`: worker nodes on demand."""
