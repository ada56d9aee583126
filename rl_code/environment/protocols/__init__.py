"""Protocols, one file each: messages, calls and answers of tools as text, and back.

Start with ``protocol.py`` and ``compact.py``; a new one is a class and an entry in
``api.PROTOCOLS``.
"""
