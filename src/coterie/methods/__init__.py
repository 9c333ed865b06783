"""Ways of learning together: the contract, one file per family, and the registry of their names."""
