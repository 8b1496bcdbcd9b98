"""OpenPBS and Torque from outside."""
