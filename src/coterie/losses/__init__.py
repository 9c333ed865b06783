"""Losses of tokens and of preferences, and their reductions."""
