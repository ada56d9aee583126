"""Rewards of answers, one file per signal: an answer and its events go in, a number comes out.

Start with ``answered.py`` and ``combine.py``.
"""
