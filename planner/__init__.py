"""Plans: which mesh a model fits on, and what its programs are for accelerators that are not here.

In go a model, an accelerator (``targets.py``) and the sizes of a step. Out come memory, operations
and bytes sent on each mesh, by arithmetic (``arithmetic.py``, with ``workload.py``, ``memory.py``,
``sent.py`` and ``attention_costs.py``; ``published.py`` puts runs of others beside it) and from
compiled programs
(``compiled.py``, which reads them by ``hlo.py``, ``flops.py``, ``collectives.py`` and
``launches.py``). ``aot.py`` compiles every kernel of a run, ``tune.py`` times block sizes on the
device that is here. Start with ``arithmetic.py``.
"""
