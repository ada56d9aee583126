"""States of training on disk: a TrainState and a position go in, and come out bit for bit.

Start with ``checkpoint.py``.
"""
