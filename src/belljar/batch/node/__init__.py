"""A node as a whole: when it is closed, and which of its machines have outlived their jobs."""
