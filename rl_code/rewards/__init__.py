"""Reward signals: a FinishedEpisode goes in, a number comes out; ``combine.py`` adds them up.

One file per signal and an entry in ``combine.SIGNALS``.
"""
