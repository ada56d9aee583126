"""Measurements: sizes go in, seconds and shares of bounds come out, as tables and JSON lines.

Each file is one subject, run by ``python -m launch.bench NAME``. Start with ``rl_step.py``.
"""
