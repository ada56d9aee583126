"""Attention over means of blocks of keys, with the scores of blocks (NSA's first branch)."""
