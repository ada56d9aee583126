"""Warm starts that learn to use feedback, for teachers that are given some."""
