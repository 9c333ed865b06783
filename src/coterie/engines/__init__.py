"""Engines, which execute the rounds of a run."""
