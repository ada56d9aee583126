"""Suites that pytest runs: work goes in, tests that passed and proofs of cheating come out.

Start with ``runner.py``, then ``canaries.py``; ``suite_grader.py`` beside this folder uses both.
"""
