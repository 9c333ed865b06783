"""Deployments, which are runs across machines: the server's and the clients' processes."""
