"""Mechanisms that keep records private: clipping, noise, accounting, and secrets to draw from.

This room knows no method and no engine.
"""
