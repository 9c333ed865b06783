"""A Flower app that executes a Coterie run; pyproject.toml contains its settings."""

from coterie.cli.flower_app import client_app, server_app

client = client_app()
server = server_app()
