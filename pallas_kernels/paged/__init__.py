"""Decoding attention over pages of keys and values."""
