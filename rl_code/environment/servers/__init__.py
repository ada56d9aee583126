"""Servers beside an episode, in sandboxes of their own: MCP servers and language servers.

Start with ``companion.py``.
"""
