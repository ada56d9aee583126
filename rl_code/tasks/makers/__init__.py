"""Tasks made from Python packages: a pinned package goes in, tasks with hidden tests come out.

Start with ``make.py``.
"""
