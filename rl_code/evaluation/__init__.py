"""Evaluation: tasks of a suite go in, pass@k, intervals and comparisons of two models come out.

Start with ``suite.py``. ``during.py`` evaluates while a run trains, ``endpoint.py`` a model behind
an OpenAI endpoint.
"""
