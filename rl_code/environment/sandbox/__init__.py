"""Sandboxes: files and a command go in, its output and the files that it left come out.

Start with ``pool.py``. ``bubblewrap.py`` isolates, ``inside/`` has the programs that run in it,
``disposable.py`` parses what an agent wrote.
"""
