"""Simulates A/A tests, A/B tests and rollbacks, prints tables and draws a figure.

    python -m experiments.ab --figure=docs/realtime.png  # 1,000 A/A tests of each kind
    python -m experiments.ab --tests=50                  # a taste, without the figure

People are simulated (``simulate.METRICS``). Nothing is kept but the figure.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from configs import realtime
from experiments.ab import report, study
from experiments.ab.simulate import ACCEPTED, LATENCY, METRICS, RETAINED, REWARD
from launch import command
from people.realtime.watching import WatchConfig
from rl_code.config import read_config

FLAGS = flags.FLAGS
USERS, SESSIONS = 400, 6_000
# of the three guardrails of configs/rehearsal.py
GUARDRAILS = 3


def main(argv: list[str]) -> None:
    rng = np.random.default_rng(FLAGS.seed)
    tests = FLAGS.tests
    size = dict(tests=tests, users=USERS, sessions=SESSIONS)
    same = study.same_arms(rng, ACCEPTED, list(study.READERS), share=0.5, **size)
    always = ["confidence sequence, users", "one-sided confidence sequence, users"]
    for metric, share in ((RETAINED, 0.5), (LATENCY, 0.5), (ACCEPTED, 0.2), (LATENCY, 0.2)):
        same += study.same_arms(rng, metric, always, share=share, **size)
    powers = [
        study.power(rng, RETAINED, effect=0.02, tests=tests // 4, users=12_000),
        study.power(rng, ACCEPTED, effect=0.02, tests=tests // 10, users=60_000),
    ]
    delays = [
        study.rollback(
            rng,
            ACCEPTED,
            effect=effect,
            tests=tests // 5,
            users=2_000,
            sessions=10_000,
            share=0.2,
            guardrails=GUARDRAILS,
        )
        for effect in (0.1, 0.2, 0.3, 0.5)
    ]
    rng = np.random.default_rng([FLAGS.seed, 1])  # of its own, whatever is simulated before
    alarms = [
        row
        for metric in METRICS
        for row in study.charts(rng, metric, tests=tests // 5, sessions=1_000)
    ]
    rng = np.random.default_rng([FLAGS.seed, 2])
    config = realtime.get_config()
    watch = read_config.build(WatchConfig, config.cycle.watch)
    people = config.parts.people["people"]
    shipped = [
        study.ends(
            rng, REWARD, LATENCY, watch, harm=harm, tests=tests, users=people, sessions=sessions
        )
        for sessions in (200, 1_000)
        for harm in (0.0, 0.1, 0.2, 0.3)
    ]
    command.console().print(*report.tables(same, powers, delays, alarms, shipped))
    if FLAGS.figure:
        report.draw(same, powers, delays, SESSIONS, Path(FLAGS.figure))


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_integer("tests", 1000, "A/A tests of each kind; the others follow from it.", 10)
    flags.DEFINE_integer("seed", 0, "Of the random numbers.")
    flags.DEFINE_string("figure", None, "The file of the figure.")


if __name__ == "__main__":
    define_flags()
    command.run(main)
