"""Plots, the page that holds them, and the audit of what leaves a client."""
