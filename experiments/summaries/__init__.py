"""Tasks for which a context is too short: what has been read must go into a summary
(``configs/summaries.py``).
"""
