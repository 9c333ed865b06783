"""Auto: the method, its settings, client and server, and the weights that clients choose."""
