"""FedMKT and its presets: the method, its settings, its two sides, and their common code."""
