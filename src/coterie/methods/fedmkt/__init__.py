"""FedMKT and its presets: the method, its settings, its two sides, and what both of them do."""
