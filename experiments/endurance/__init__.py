"""A run of thousands of updates under kills, deaths of sandboxes and a full disk, and its audit.

Start with ``__main__.py``. ``plan.py`` says which fault comes when, ``play.py`` runs the trainer
and strikes it, ``dying.py`` is the trainer whose sandboxes die, ``small_disk.py`` gives it a disk
that fills up, and ``report.py`` proves that nothing was lost and draws the score.
"""
