"""Answers and users that an update and a test of the agent's cycle need.

    python -m experiments.agent_people.arithmetic [--users=1000] [--noise_scale=2300]

An agent that is right in 40 % of its turns is compared with one that is right in 20 points more,
which is what GRPO gains on the same kind of tasks (docs/results/quickstart.md, questions.md). The
people of configs/realtime_agent.py judge both, without a server (``sizes.py``); and once more where
they look only hours later.
``python -m experiments.agent_people.noise`` measures the noise scale on a run.
"""

from __future__ import annotations

from absl import flags as absl_flags

from experiments.agent_people import sizes
from launch import command

_USERS = absl_flags.DEFINE_integer("users", 1_000, "Simulated users of each arm.", 50)
_NOISE = absl_flags.DEFINE_float("noise_scale", 2_300.0, "Noise scale of the gradient, in answers.")
# Sessions of each simulated user.
_SESSIONS = 4


def main(argv: list[str]) -> None:
    rights = (sizes.BEFORE, sizes.AFTER)
    quick, seldom = (
        tuple(sizes.simulate(right, _USERS.value, _SESSIONS, seldom=late) for right in rights)
        for late in (False, True)
    )
    command.console().print(
        sizes.tests(*quick), sizes.updates(_NOISE.value), sizes.looks(quick, seldom)
    )


if __name__ == "__main__":
    command.run(main)
