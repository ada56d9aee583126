"""Learning: groups of trajectories go in, the next weights and the metrics of the step come out.

Start with ``learner.py``, which goes from ``advantages.py`` over ``batching.py`` to ``update.py``,
one jitted program. ``losses.py`` has a function for each loss of a policy; ``teacher.py`` has the
teacher of a run, and ``distillation.py`` its part of the loss.
"""
