"""The kinds of data: how records of each become items, and items tokens."""
