"""Tab, learned from what people do with it: served, trained, tested and deployed in a cycle.

What: the model of configs/tab.py after its warm start is served over HTTP; simulated programmers in
  processes of their own use it and report what they did; a cycle trains on their answers, plays
  held-out holes for a judge who is not in the field, and watches the new version with half of the
  users. people=None serves whoever has the URL instead.
Command: python -m launch.realtime --config=configs/realtime.py --workdir=runs/realtime --cycles=3
  configs/realtime.py:bad makes the first candidate bad on purpose and has the gate let it through.
Hardware: 2 CPU cores. Run time: 9 minutes, of which the warm start takes three.
Expected metric: three candidates are trained, judged and watched, and promoted only where that is
  proven. So few people seldom prove a step of this size (docs/results/cycle.md).
"""

import ml_collections

from configs import rehearsal, tab


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "", "smoke" (a minute or two: no warm start to speak of, few people) or "bad"."""
    if arg not in ("", "smoke", "bad"):
        raise ValueError(f"configs/realtime.py:{arg}: the argument must be empty, smoke or bad")
    smoke = arg == "smoke"
    config = rehearsal.get_config()
    with config.ignore_type():
        config.parts = dict(
            name="served",
            run=_run(smoke),
            # A real one: silence_s=3_600, as long as people take to come back to a suggestion.
            # Simulated people know at once how much of a text is alive after an hour.
            feedback=dict(
                silence_s=1.0 if smoke else 5.0,
                claims=dict(early_s=3_600.0),
            ),
            people=dict(people=24 if smoke else 96, at_once=8 if smoke else 16, holes=4),
        )
    # An answer shows up in the rates below only where it can: nobody edits or asks here.
    config.cycle.update(poll_s=0.5, least_sessions=48 if smoke else 256, batch=_batch(smoke))
    config.cycle.gate.update(
        margin=1.0 if smoke else 0.05,
        anchor_margin=1.0 if smoke else 0.05,
        least_tasks=4 if smoke else 32,
        rates=(dict(rate="tokens", rise=24.0 if smoke else 4.0),),
    )
    config.cycle.watch.update(
        share=0.5,
        metric="reward",
        scale=0.1,
        margin=1.0 if smoke else 0.1,
        least_users=4 if smoke else 20,
        guardrails=(dict(metric="latency", harm="up", scale=1.0, allowed=2.0),),
        # Then what is not proven is rolled back. at_end="promote" would promote a candidate that is
        # worse by 0.2 in 3 of 4 tests of 200 sessions (docs/realtime.md).
        most_s=30.0 if smoke else 120.0,
    )
    config.cycle.monitors.update(rates=(dict(metric="length", chart="ewma", side="up"),))
    if arg == "bad":
        # noise as large as the weights themselves, which suites would notice
        config.parts.spoiled = dict(cycles=(1,), noise=1.0)
        config.cycle.gate.update(margin=1.0, anchor_margin=1.0, rates=())
    return config


def _batch(smoke: bool) -> int:
    """Answers of a cycle at most."""
    return 256 if smoke else 2048


def _run(smoke: bool) -> ml_collections.ConfigDict:
    """The model that is served and trained."""
    config = tab.get_config("smoke" if smoke else "")
    with config.ignore_type():
        config.metrics = dict(extra=())
        config.suites = (
            dict(
                name="held_out",
                tasks=dict(name="infill", split="test", seed=1, levels=(1, 2)),
                count=8 if smoke else 128,
                samples=1 if smoke else 2,
            ),
        )
        # Answers to different requests: each is a group of its own, and no prompt is shared.
        # A cycle is one large update, so that all of it is on-policy (cycle.window=1). 256 answers
        # are far below the noise scale (docs/results/tab.md); of 8 times as many the gradient is
        # worth a step that is 2.5 times as long.
        config.train.update(
            tasks_per_step=_batch(smoke), group_size=1, micro_batches=32 if smoke else 128
        )
        config.train.pack = dict(slots=256, targets=96, rows=_batch(smoke) // 2)
        config.train.optimizer = dict(learning_rate=1e-3)
    # One device, which server and learner share.
    config.mesh.update(data=1)
    return config
