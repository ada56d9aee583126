"""A run is a recording: what can be done with one that has trained for some steps.

    fork.py                   another run that shares the record before a step
    fork_changes.py           what a fork may change, and what it takes over of later steps
    fork_position.py          where a fork goes on in the list of tasks
    process_training.py       a process reward model made of recorded continuations
    replay_training.py        training again on the recorded groups
    replay_trajectories.py    sampling recorded trajectories again
    recorded_versions.py      the weights that sampled them, read or made again
    trajectory_difference.py  where two trajectories differ first
    bisect.py                 where two runs differ first, and which input made it
    review.py                 changes that solved work did not need
    reward_models.py          reward models made of the outcomes on record
    kept_config.py            the config that a run keeps in its workdir

Each builds the parts of the recorded run (``rl_code.run.run.Run``). What makes the record is
elsewhere: ``rl_code/store/``, ``rl_code/checkpoint/``, ``rl_code/run/lineage.py``.
"""
