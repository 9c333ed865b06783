"""A server for the models of finished runs, with the interface of OpenAI's API, and a web page."""
