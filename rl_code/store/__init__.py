"""The durable record of a run: plans, claims and groups of each step, written exactly once.

Start with ``store.py``. Actors put groups in, the learner takes whole steps out, and consumed
steps move into shards (``compaction.py``).
"""
