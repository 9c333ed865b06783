"""Evaluation: the metrics of models and their answers, and the quality of clients' texts."""
