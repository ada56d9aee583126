"""Small studies, each a package that runs as ``python -m experiments.<name>``.

In go the workdirs of runs, or nothing where all is simulated; out come a table and a figure. No run
needs a study. Start with the docstring of the ``__main__`` of one.
"""

import launch  # noqa: F401  a study begins as the other commands do
