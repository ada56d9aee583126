"""Attention over chosen blocks of keys (NSA's second branch, MoBA), forward and backward."""
