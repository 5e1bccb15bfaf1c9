"""The run folder: its schema, writing it, reading it."""
