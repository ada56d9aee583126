"""A process reward model trained on the continuations of a run (Math-Shepherd, 2312.08935).

What: labels of turns are shares of continuations that solved the task; the backbone begins as the
  policy that was forked, and is trained with cross-entropy at the turn borders.
Command: python -m launch.process_model --config=configs/process_model.py --workdir=runs/prm
  --config.runs="('runs/forked',)" --config.backbone=runs/forked
Hardware: 2 CPU cores. Run time: 2 minutes beside another program.
Expected metric: a squared error of 0.04 on borders of held-out tasks, 0.22 of the mean label.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (a few updates)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/process_model.py:{arg}: the argument must be empty or smoke")
    smoke = arg == "smoke"
    return ml_collections.ConfigDict(
        dict(
            runs=("runs/forked",),
            backbone="runs/forked",
            optimizer=dict(learning_rate=3e-4, schedule="cosine", total_steps=300, warmup_steps=5),
            steps=4 if smoke else 300,
            held_out=0.2,
            rows=4 if smoke else 16,
            checkpoint_every=2 if smoke else 100,
        )
    )
