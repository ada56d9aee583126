"""Attention over contexts: queries, keys and values go in, outputs of the same shape come out.

Start with ``methods/method.py`` (the interface) and ``reference.py`` (the definitions, in plain
jnp). ``cache/`` keeps keys and values in pages; ``ring.py`` cuts contexts over devices.
"""
