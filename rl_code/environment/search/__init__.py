"""Search in the files of a workspace: a question goes in, pieces of files come out.

Start with ``index.py``.
"""
