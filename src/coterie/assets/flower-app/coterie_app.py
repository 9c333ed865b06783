"""A Flower app that executes a Coterie run; pyproject.toml contains its settings."""

from coterie.flower import client_app, server_app

client = client_app()
server = server_app()
