"""Deployment and simulation on Flower 1.41, which carries bytes and knows nothing of methods."""

import os

# Read when flwr is imported: a site's machine reports nothing to anybody.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
