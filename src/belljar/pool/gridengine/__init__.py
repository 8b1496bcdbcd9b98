"""Grid Engine from outside."""
