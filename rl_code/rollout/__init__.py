"""Sampling: tasks, weights and a random key go in, groups of episodes come out.

Start with ``scheduler.py``, which plays many episodes at once on ``engine.py``: prefill, decoding
and pages of keys and values. ``actor.py`` runs it beside a learner, as far ahead as
``asynchrony.py`` says.
"""
