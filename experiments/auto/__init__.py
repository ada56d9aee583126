"""Regret of the router that learns beside fixed shares, on what simulated people do."""
