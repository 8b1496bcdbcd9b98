"""UDP in an event loop: sockets, names of others, and who may ask how much."""
