"""How a server turns uploads into downloads."""
