"""Appended to the path of an engine that runs without a GPU; see README.md."""
