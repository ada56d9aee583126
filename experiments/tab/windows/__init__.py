"""The command that compares data of older policies."""
