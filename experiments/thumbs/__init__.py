"""Thumbs whose voters are not the users: effects of optimising them."""
