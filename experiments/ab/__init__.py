"""A/A tests, A/B tests and rollbacks on simulated people: error rates of the decisions of the
cycle.
"""
