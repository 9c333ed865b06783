"""FedAMoLE: the method, its settings, its two sides, and how experts are named."""
