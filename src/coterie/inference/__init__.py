"""Trained models: loading, choosing and referencing them, and talking with them."""
