"""Plan of the faults of a long run, kept in its folder for the command that goes on with it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically

PLAN_FILE = "plan.json"
KILL, FULL_DISK = "kill", "full disk"
# Faults are due until this share of the run is done, so that it does not end before the last one.
_UNTIL = 0.98
# Where the first stretch without kills begins, as a share of the run. The other one is at the end.
_QUIET_AT = 0.4


@dataclasses.dataclass
class Fault:
    """One fault, and what came of it."""

    # KILL or FULL_DISK.
    what: str
    # Updates that must be done before.
    step: int
    # Seconds after that.
    delay_s: float
    # Facts of the strike; None while it is to come.
    done: dict[str, Any] | None = None


@dataclasses.dataclass
class Plan:
    """Faults of a run in the order of their steps."""

    steps: int
    seed: int
    # Updates [first, last) without kills, in which the growth of the memory is measured.
    quiet: list[tuple[int, int]]
    faults: list[Fault]
    # Processes that were started, and the seconds for which they ran.
    lives: int = 0
    seconds: float = 0.0

    @property
    def next(self) -> Fault | None:
        """First fault that is still to come."""
        return next((fault for fault in self.faults if fault.done is None), None)

    def save(self, folder: Path) -> None:
        """Writes the plan and what was done so far."""
        data = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        write_atomically(folder / PLAN_FILE, data.encode())


def make(steps: int, kills: int, full_disks: int, quiet: int, delay_s: float, seed: int) -> Plan:
    """A plan with faults at random steps. quiet: length of each stretch without kills."""
    rng = random.Random(seed)
    first = round(_QUIET_AT * steps)
    stretches = [(first, first + quiet), (steps - quiet, steps)] if quiet else []
    last = min(round(_UNTIL * steps), steps - quiet)
    open_steps = [step for step in range(last) if not _within(step, stretches)]
    if not open_steps:
        raise ConfigError(f"--quiet={quiet}: two stretches leave no step of {steps} for faults")
    whats = [KILL] * kills + [FULL_DISK] * full_disks
    faults = [Fault(what, rng.choice(open_steps), rng.uniform(0.0, delay_s)) for what in whats]
    return Plan(steps, seed, stretches, sorted(faults, key=lambda fault: fault.step))


def load(folder: Path) -> Plan | None:
    """The plan of a folder; None where there is none yet."""
    path = folder / PLAN_FILE
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    found["faults"] = [Fault(**fault) for fault in found["faults"]]
    found["quiet"] = [tuple(stretch) for stretch in found["quiet"]]
    return Plan(**found)


def check(plan: Plan, steps: int, kills: int, full_disks: int) -> None:
    """Raises ConfigError where a command asks for another run than the plan was made for."""
    known = (plan.steps, count(plan, KILL), count(plan, FULL_DISK))
    if known != (steps, kills, full_disks):
        raise ConfigError(
            f"train.steps={steps} --kills={kills} --full_disks={full_disks}: the plan in the "
            f"workdir is for {known[0]} steps, {known[1]} kills and {known[2]} full disks; give "
            "the same numbers, or another workdir"
        )


def count(plan: Plan, what: str, *, done: bool = False) -> int:
    """Number of faults of a kind; done: those that have come."""
    return sum(fault.what == what and (fault.done is not None or not done) for fault in plan.faults)


def _within(step: int, stretches: Sequence[tuple[int, int]]) -> bool:
    return any(first <= step < last for first, last in stretches)
