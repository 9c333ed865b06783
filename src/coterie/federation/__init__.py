"""The participants of a run, and the data that they hold."""
