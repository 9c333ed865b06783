"""FedMKT and its presets: the method, its settings, client and server, and their common code."""
