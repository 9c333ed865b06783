"""How models are scored: losses, answers, what they write, and the metrics that sum it up."""
