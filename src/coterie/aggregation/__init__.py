"""Aggregation of clients' uploads, and transforms of uploads, downloads and means."""
