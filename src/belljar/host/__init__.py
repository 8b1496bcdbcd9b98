"""The door of the ground floor: what this computer offers. Files, locks, processes, space; nothing about machines."""
