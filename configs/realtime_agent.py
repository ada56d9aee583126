"""An agent, learned from what people do with its work: served, trained, tested in a cycle.

What: the agent from scratch that writes functions from a few words (the warm start of
  configs/questions.py, and a tenth of demonstrations after a complaint) is served over HTTP.
  Simulated people bring it wants, half of which can be read in two ways, carry out its tools, keep,
  mend or take back what it wrote, complain, ask again, switch, open pull requests, leave. A cycle
  trains on their answers by an agent's standard reward. A fifth of the users always has the warm
  start, a copy that never changes.
Why this agent: of those of this project it is the smallest that meets all that people report about:
  a want is one or two messages of 30 tokens, it asks and breaks calls, and GRPO gained 28 points on
  clear tasks in 20 updates of 48 episodes (docs/results/questions.md).
Command: python -m launch.realtime --config=configs/realtime_agent.py --workdir=runs/realtime_agent
  --cycles=10, then python -m experiments.agent_people runs/realtime_agent
  configs/realtime_agent.py:bad makes the first candidate bad on purpose and has the gate let it
  through; configs/realtime_agent.py:seldom has as many answers, and people who look only hours
  later. Sizes of a cycle: python -m experiments.agent_people.arithmetic
Hardware: 2 CPU cores. Run time: 2.5 minutes a cycle, 3 to 6 beside other programs.
Expected metric: ten cycles; retained rises and dissatisfied follow-ups fall against the copy that
  never changes; at least one candidate proven better, the bad one rolled back.
"""

import ml_collections

from configs import questions, rehearsal

# Answers of an update, and updates of a cycle. docs/results/realtime_agent.md has the arithmetic.
UPDATE, UPDATES = 640, 2
TASKS = "experiments.incidents.tasks:FromWords"
# As configs/questions.py has them: half of the wants name two constants of which one is meant.
WANTS = dict(name=TASKS, levels=(1,), unclear="two", share=0.5)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "", "smoke" (two minutes: no warm start to speak of, few people), "bad" or "seldom"
    (people look only every few hours).
    """
    if arg not in ("", "smoke", "bad", "seldom"):
        raise ValueError(
            f"configs/realtime_agent.py:{arg}: the argument must be empty, smoke, bad or seldom"
        )
    smoke = arg == "smoke"
    config = rehearsal.get_config()
    with config.ignore_type():
        config.parts = dict(
            name="served",
            run=_run(smoke),
            # the tests of a suite's tasks judge, and nobody's taste
            judge=None,
            # Simulated people know at once how long a text lives. No signals are named, so answers
            # are paid by those of an agent (AGENT_SIGNALS).
            feedback=dict(silence_s=1.0 if smoke else 8.0, claims=dict(early_s=3_600.0)),
            agents=dict(
                tasks=WANTS | dict(split="train", seed=7),
                tools=("write_file", "submit", "ask"),
                people=24 if smoke else 160,
                at_once=6 if smoke else 16,
                # the others are for judging: "tester", "namer", "silent", "voter"
                kinds=("steady", "careful", "hurried", "terse"),
                turns=2,
                turn_tokens=48,
                late_s=0.5 if smoke else 2.0,
                # They know at once what they will find then. Real ones need a silence_s of hours.
                seldom=arg == "seldom",
            ),
        )
    config.cycle.update(
        poll_s=0.5,
        control_share=0.2,
        # a session has two answers and more
        least_sessions=24 if smoke else 500,
        batch=64 if smoke else UPDATE * UPDATES,
        window=1 if smoke else UPDATES,
    )
    config.cycle.gate.update(
        margin=1.0 if smoke else 0.06,
        anchor_margin=1.0 if smoke else 0.06,
        least_tasks=4 if smoke else 64,
        rates=(
            dict(rate="invalid_calls", rise=1.0 if smoke else 0.05),
            dict(rate="edits", fall=1.0 if smoke else 0.1),
        ),
    )
    config.cycle.watch.update(
        share=0.5,
        metric="reward",
        scale=0.3,
        margin=1.0 if smoke else 0.15,
        least_users=4 if smoke else 30,
        guardrails=(
            dict(metric="invalid_calls", harm="up", scale=0.2, allowed=0.1),
            dict(metric="reward/follow_up", harm="down", scale=0.1, allowed=0.05),
            dict(metric="latency", harm="up", scale=1.0, allowed=2.0),
        ),
        # some 300 sessions of each arm show 20 points (docs/results/realtime_agent.md)
        most_sessions=None if smoke else 640,
        most_s=30.0 if smoke else 900.0,
    )
    config.cycle.monitors.update(
        rates=(
            dict(metric="edits", side="down"),
            dict(metric="questions", side="up"),
            dict(metric="invalid_calls", side="up"),
        )
    )
    if arg == "bad":
        # noise as large as the weights themselves, which suites would notice
        config.parts.spoiled = dict(cycles=(1,), noise=1.0)
        config.cycle.gate.update(margin=1.0, anchor_margin=1.0, rates=())
        # a wide margin would promote it
        config.cycle.watch.margin = 0.05
    return config


def _run(smoke: bool) -> ml_collections.ConfigDict:
    """The agent that is served and trained."""
    config = questions.get_config("smoke" if smoke else "")
    with config.ignore_type():
        config.metrics = dict(extra=())
        config.tools = ("write_file", "submit", "ask")
        config.tasks.update(complaints=0.1, broken=0.1)
        config.reward = dict(signals=("tests", dict(name="malformed", weight=0.1)))
        # names of the tools over the API, and in suites
        tools = dict(ask_tools=("ask",), edit_tools=("write", "write_file"))
        config.serving = tools
        config.suites = (
            dict(
                # Other tasks of the same split: those of one operation that are held out are
                # of operations that this agent has never seen.
                name="same_kind",
                tasks=WANTS | dict(split="train", seed=1),
                count=8 if smoke else 96,
                samples=1 if smoke else 4,
            ),
        )
        config.train.update(
            tasks_per_step=64 if smoke else UPDATE,
            group_size=1,
            micro_batches=2 if smoke else 8,
        )
        # a complaint and what came before it stand in front of an answer
        config.train.pack = dict(slots=384, targets=256, rows=32 if smoke else UPDATE // 2)
        # at twice the rate updates of so few answers end anywhere: docs/results/realtime_agent.md
        config.train.optimizer = dict(learning_rate=3.5e-4, warmup_steps=4)
        config.sft.update(slots=160)
    config.rollout.engine.update(prompt_length=64)
    config.limits = dict(turns=6, tokens=384, turn_tokens=48, test_runs=0, command_s=5.0)
    # One device, which server and learner share.
    config.mesh.update(data=1)
    return config
