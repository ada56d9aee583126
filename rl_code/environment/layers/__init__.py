"""Worlds in layers: a repository, packages or an image go in; read-only folders, named by their
content, come out.

Start with ``store.py``.
"""
