"""Linked pairs of tasks: the second one asks for a value that only the first one shows
(``configs/pairs.py``).
"""
