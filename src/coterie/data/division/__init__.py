"""Division of one data set among clients (`divide:` in a run file), and its files."""
