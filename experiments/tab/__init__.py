"""A Tab model that learns when to suggest nothing, from what simulated programmers accept."""
