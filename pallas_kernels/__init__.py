"""Pallas kernels, one folder each: ``reference.py`` (plain jnp), ``tpu.py``, ``gpu.py`` and
``api.py``, which chooses.

Start with ``flash/``. The files here hold what kernels share: tokens of packed rows, padding,
costs, tuned block sizes.
"""
