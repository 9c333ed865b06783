"""The built-in kinds of data: each reads records as items, and encodes items as tokens."""
