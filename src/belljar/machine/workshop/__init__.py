"""Machines that work on disks nobody trusts."""
