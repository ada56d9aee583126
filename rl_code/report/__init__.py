"""The report: a workdir goes in, one HTML page with curves and a reader for trajectories comes
out.

Start with ``page.py``.
"""
