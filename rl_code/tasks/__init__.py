"""Sources of tasks, one file each: settings go in, Tasks come out.

Start with ``source.py`` and ``mbpp.py``; the sources stand in ``api.SOURCES``. ``makers/`` makes
tasks from the tests of a package, ``validate.py`` tries every task with its reference.
"""
