"""The built-in kinds of data. Each kind reads records as items and encodes items as tokens."""
