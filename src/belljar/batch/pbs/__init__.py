"""OpenPBS and Torque, and what they have in common."""
