"""Trained models: loading, choosing the best, use as a DPO reference, and conversations."""
