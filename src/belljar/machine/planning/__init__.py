"""What is decided before a machine is started."""
