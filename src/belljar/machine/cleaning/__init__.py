"""How a machine is put away, by its own supervisor or after it died."""
