"""Losses on tokens and on pairs of answers."""
