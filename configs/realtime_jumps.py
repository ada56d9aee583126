"""Tab jumps, learned from what people do with them: served, trained, tested, deployed in a cycle.

What: the model of configs/tab_jumps.py after its warm start is served over HTTP; simulated
  programmers in processes of their own carry changes through several files, ask where to go next
  after each edit, and report which jumps they took. A cycle trains on their answers, plays moments
  of the held-out kinds of change for a judge who is not in the field, and watches the new version
  with half of the users. A fifth of the users always has the warm start, a copy that never changes.
Command: python -m launch.realtime --config=configs/realtime_jumps.py --workdir=runs/realtime_jumps
  --cycles=6
Hardware: 2 CPU cores. Run time: 5 minutes a cycle beside other programs, and the warm start of
  configs/tab_jumps.py before (docs/results/tab_jumps.md).
Expected metric: the reward of people rises against the copy that never changes.
"""

import ml_collections

from configs import rehearsal, tab_jumps

# Answers of an update, and updates of a cycle. Offline 120 updates of 128 answers, 8 of them to the
# same page, gained 0.15 of reward (docs/results/tab_jumps.md).
UPDATE, UPDATES = 512, 4


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (a minute of one core: no warm start to speak of, few people)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/realtime_jumps.py:{arg}: the argument must be empty or smoke")
    smoke = arg == "smoke"
    config = rehearsal.get_config()
    with config.ignore_type():
        config.parts = dict(
            name="served",
            run=_run(smoke),
            judge=dict(suggests="place", habits="careful"),
            feedback=dict(
                # Nothing is retained of a jump: a decision is all that comes, some of it late. A
                # real one: as long as a person takes to make the next edit.
                silence_s=1.0 if smoke else 8.0,
                claims=dict(early_s=3_600.0),
                reward=dict(signals=("tab", dict(name="latency", cap=(-0.1, 0.0)))),
            ),
            jumpers=dict(
                habits=tab_jumps.PEOPLE,
                people=24 if smoke else 160,
                at_once=8 if smoke else 16,
                late_s=0.5 if smoke else 2.0,
                seed=7,
            ),
        )
    config.cycle.update(
        poll_s=0.5,
        control_share=0.2,
        # a session has two answers
        least_sessions=24 if smoke else 700,
        batch=64 if smoke else UPDATE * UPDATES,
        window=1 if smoke else UPDATES,
    )
    config.cycle.gate.update(
        margin=1.0 if smoke else 0.05,
        anchor_margin=1.0 if smoke else 0.05,
        least_tasks=4 if smoke else 64,
        # a place has six tokens, and nothing has one
        rates=(dict(rate="tokens", rise=24.0 if smoke else 4.0),),
    )
    config.cycle.watch.update(
        share=0.5,
        metric="reward",
        scale=0.1,
        margin=1.0 if smoke else 0.1,
        least_users=4 if smoke else 30,
        guardrails=(dict(metric="latency", harm="up", scale=1.0, allowed=2.0),),
        most_sessions=None if smoke else 1_200,
        most_s=30.0 if smoke else 600.0,
    )
    config.cycle.monitors.update(rates=(dict(metric="accepted", chart="ewma", side="down"),))
    return config


def _run(smoke: bool) -> ml_collections.ConfigDict:
    """The model that is served and trained."""
    config = tab_jumps.get_config("smoke" if smoke else "")
    with config.ignore_type():
        config.metrics = dict(extra=())
        config.suites = (
            dict(
                name="held_out_kinds",
                tasks=dict(name="jumps", split="test", seed=1),
                count=8 if smoke else 128,
                samples=1 if smoke else 4,
            ),
        )
        # Answers to different requests: each is a group of its own, and no prompt is shared.
        update = 64 if smoke else UPDATE
        config.train.update(tasks_per_step=update, group_size=1, micro_batches=8 if smoke else 32)
        # two pages with their answers in a row
        config.train.pack = dict(slots=512, targets=128, rows=update // 2)
        config.train.optimizer = dict(learning_rate=8e-4)
    # One device, which server and learner share.
    config.mesh.update(data=1)
    return config
