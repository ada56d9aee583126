"""Notes on a repository that an agent makes in idle time, and what they save on the tasks that come
later (``configs/notes.py``).
"""
