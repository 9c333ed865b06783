"""Methods: the interface, one file or sub-package per family, and the registry of names."""
