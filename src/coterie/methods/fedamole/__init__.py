"""FedAMoLE: the method, its settings, client and server, and names of experts in messages."""
