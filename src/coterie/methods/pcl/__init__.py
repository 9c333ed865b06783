"""PCL: the method with its client and server, its strategies, and trust weights."""
