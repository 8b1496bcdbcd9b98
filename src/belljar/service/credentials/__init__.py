"""Certificates, keys and proxies on this host."""
