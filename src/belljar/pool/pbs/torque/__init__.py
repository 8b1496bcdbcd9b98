"""Torque from outside."""
