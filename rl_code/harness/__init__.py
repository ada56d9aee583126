"""Agents of others: a task goes to their program, which asks our endpoint for messages; the tokens
that it was served come out as a Trajectory.

Start with ``episode.py``. ``endpoint/`` speaks OpenAI's API and keeps the tokens; the other files
have one program each. A new one is a class and an entry in ``api.AGENTS``.
"""
