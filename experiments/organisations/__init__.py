"""One Tab model and two organisations whose programmers want different suggestions: an adapter for
each, beside one that both share.
"""
