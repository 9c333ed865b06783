"""Data: text files or datasets become documents, tokens, batches and windows."""
