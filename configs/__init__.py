"""Configs, one file per experiment: ``get_config(argument)`` returns an ``ml_collections`` dict.

Start with ``quickstart.py``. Data only; every config takes ``:smoke``.
"""
