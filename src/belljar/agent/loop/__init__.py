"""The agent's event loop, its channel to the host, and what goes over it."""
