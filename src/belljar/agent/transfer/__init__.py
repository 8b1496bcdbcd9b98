"""Files and folders as tar streams, written and read without trust. The host uses the same code."""
