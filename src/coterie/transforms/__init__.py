"""Transforms of uploads, downloads and means, which users can add to any method."""
