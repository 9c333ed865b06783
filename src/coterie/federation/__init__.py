"""The participants of a run and their data."""
