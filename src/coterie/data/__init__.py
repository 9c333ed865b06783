"""Data: reading text files and data sets, and encoding them as tokens, samples and batches."""
