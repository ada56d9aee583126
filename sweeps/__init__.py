"""Sweeps: a config run once per set of overrides, and its runs compared.

In go a config file's overrides (``runs.py``). Each run is a process of this machine (``start.py``),
or of a node of a Ray cluster (``on_ray.py``); ``running.py`` waits for their ends. ``fork.py``
makes the runs forks of one run. Out come a table (``table.py``, ``costs.py``, ``paired.py``) and a
figure (``figure.py``). ``done.py`` finds what has finished, for other sweeps and for experiments.
``papers.py`` has the table of papers that are reproduced by such runs. Start with ``runs.py``.
"""

# The file in a run's folder which says that the run has finished.
DONE = "sweep_done.json"
