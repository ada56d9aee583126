"""Reports of what people did with answers: events go in, rewards of answers come out.

Start with ``records.py`` and ``store.py``; ``rewards/`` has a file per signal.
"""
