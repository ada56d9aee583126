"""A reward model of a run's outcomes, which reads the task and the change of the work.

What: the policy of the quickstart with a scalar head, trained by the logistic loss on outcomes that
  its own run recorded; a quarter of the tasks is held out to judge it. With the argument "truth" it
  also reads the change of the reference.
Command: python -m launch.reward_model --config=configs/reward_model.py --workdir=runs/reward_model
  after bash launch/quickstart.sh, or with --config.weights and --config.runs of other runs.
Hardware: 2 CPU cores. Run time: 4 minutes beside another program, half of it for the outcomes.
Expected metric: AUC of 0.84 on held-out tasks, 0.60 within a task; no higher with sight of the
  truth, which this small model makes no use of.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "", "truth", or "smoke" (seconds of training on few steps)."""
    if arg not in ("", "truth", "smoke"):
        raise ValueError(
            f"configs/reward_model.py:{arg}: the argument must be empty, truth or smoke"
        )
    smoke = arg == "smoke"
    config = dict(
        weights="runs/quickstart",
        runs=("runs/quickstart",),
        reading=dict(tokens=384, sees_reference=arg == "truth"),
        fit=dict(
            kind="outcomes",
            updates=4 if smoke else 300,
            rows=8,
            optimizer=dict(learning_rate=3e-4, warmup_steps=1 if smoke else 20),
        ),
        held_out=0.25,
    )
    if smoke:
        config |= dict(every=10)
    return ml_collections.ConfigDict(config)
