"""FedAMoLE: the method, its settings, its two sides, and the names of experts in messages."""
