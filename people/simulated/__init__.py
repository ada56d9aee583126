"""Simulated programmers, fitted on what real ones did with the suggestions of an editor."""
