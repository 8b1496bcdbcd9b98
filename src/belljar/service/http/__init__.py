"""HTTP/1.1 as programs of ours serve it: short answers to short requests (server.py), how often one may ask (limits.py), and the
authentication of old clients (digest.py)."""
