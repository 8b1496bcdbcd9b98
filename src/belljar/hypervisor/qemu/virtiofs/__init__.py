"""Folders of the host by virtiofs."""
