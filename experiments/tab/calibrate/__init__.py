"""The command that calibrates how matches are read."""
