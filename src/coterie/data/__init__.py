"""The data room: text files or data sets become documents, tokens, batches and windows."""
