"""A run across machines: the server, a client's process, and what both show."""
