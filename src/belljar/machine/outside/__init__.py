"""Machines seen and asked for from outside: nothing here runs in the process that keeps one."""
