"""What runs the rounds."""
