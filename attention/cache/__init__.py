"""Paged caches of keys and values: pages go in by the lists of their rows, and are read block by
block.

Start with ``paged.py``; ``writer.py`` and ``reader.py`` are the two ways through it.
"""
