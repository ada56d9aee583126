"""Episodes of an agent in a sandbox: a Task goes in, a Trajectory with its Reward comes out.

Start with ``episode.py``. ``tools/``, ``protocols/``, ``sandbox/`` (where code of the model runs),
``suites/`` (tests that pytest runs), ``layers/`` (worlds of files), ``search/`` and ``servers/``
(MCP, language servers) have what it uses; ``grader.py`` and ``suite_grader.py`` judge the work.
"""
