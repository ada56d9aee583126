"""A short run for fault tests: a learner and actors in processes of their own, one step apart.

What: the quickstart's smoke run with more steps, few episodes each.
Command: python -m launch.faults --config=configs/faults.py --workdir=runs/faults --kills=30
--hangs=3 Hardware: 2 CPU cores. Run time: about 12 seconds a kill.
Expected metric: "every check passed" on the last line.
"""

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (fewer steps)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/faults.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config("smoke")
    steps = 16 if arg == "smoke" else 240
    config.mesh.update(data=1)
    config.train.update(steps=steps, tasks_per_step=4, group_size=2)
    config.train.update(micro_batches=4)
    config.checkpoint.update(every=3)
    config.suites = ()
    config.asynchrony = dict(mode="one_step", work=dict(heartbeat_timeout_s=5.0))
    return config
