"""Evaluation: perplexity, accuracy, generated answers, and the metrics that summarise them."""
