"""HTTP/1.1 as programs of ours serve it: short answers to short requests (server.py), and the authentication
of old clients (digest.py)."""
