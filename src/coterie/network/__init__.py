"""Links between machines: keys, certificates, signatures, and connections."""
