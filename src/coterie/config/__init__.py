"""The run file: its schema, how it is read, its error messages, and plugins."""
