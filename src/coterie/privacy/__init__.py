"""Differential privacy: clipping, noise, accounting of budgets, and secret seeds.

This package depends on no method and no engine.
"""
