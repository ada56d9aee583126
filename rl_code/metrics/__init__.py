"""Numbers of a run: a dict per step goes in; ``metrics.jsonl``, TensorBoard, W&B or Trackio come
out.

Start with ``writers.py``. ``progress.py`` is the line that a person watches.
"""
