"""Devices of this host on the way to a machine and back; its processors and large pages."""
