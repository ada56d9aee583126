"""Kills a learner and its actors at random moments, then proves that nothing was lost or changed.

    python -m launch.faults --config=configs/faults.py --workdir=runs/faults --kills=30 --hangs=3

Each role runs under launch/supervise.sh, which starts it again. Every kill is a SIGKILL of one role
and all its children, sandboxes included. It comes some seconds after a random step, even while that
role or another is just starting. One kill in four strikes the learner. Between kills, actors are
stopped (SIGSTOP) until others have taken over all that they held. When the run has ended, its store
is audited and replayed: nothing may be lost, repeated or changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from launch import flags
from rl_code import read_config
from rl_code.files import write_atomically
from rl_code.run_config import RunConfig, refuse_sync
from rl_code.store import audit
from rl_code.store import steps as steps_lib
from rl_code.store.store import GroupStore
from rl_code.weights.waiting import Deadline
from rl_code.workdir import STORE

ROOT = Path(__file__).resolve().parents[1]
# Seconds within which others must have taken over what a hung actor held, even if they are just
# starting.
_TAKEOVER_S = 120.0
FLAGS = absl_flags.FLAGS
absl_flags.DEFINE_integer("kills", 30, "How many.", 0)
absl_flags.DEFINE_integer(
    "hangs", 3, "Actors that are stopped for a while, beside those that are killed.", 0
)
absl_flags.DEFINE_integer("actors", 2, "Actors beside the learner.", 1)
absl_flags.DEFINE_integer("strike_seed", None, "Of the moments and the victims; random by default.")
absl_flags.DEFINE_float(
    "delay_s", 5.0, "Most seconds from the step after which a fault is due until it falls.", 0.0
)
absl_flags.DEFINE_integer("minutes", 60, "Gives up after so many.", 1)


class FaultsError(RuntimeError):
    """The run did not end, or a check failed."""


@dataclasses.dataclass
class Role:
    """One role under its supervisor. pid: of the process itself, 0 while there is none."""

    name: str
    supervisor: subprocess.Popen

    @property
    def pid(self) -> int:
        """The supervisor's child that runs Python."""
        path = Path(f"/proc/{self.supervisor.pid}/task/{self.supervisor.pid}/children")
        try:
            children = [int(pid) for pid in path.read_text().split()]
        except OSError:
            return 0
        for pid in children:
            try:
                if b"launch.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        return 0


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    refuse_sync(run_config)
    if FLAGS.hangs and FLAGS.actors < 2:
        raise read_config.ConfigError(
            f"--hangs={FLAGS.hangs} --actors={FLAGS.actors}: nobody could take over"
        )
    # the roles end with this program, however it is stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path = config_flags.get_config_filename(FLAGS["config"])
    command = [f"--config={path}", *flags.overrides(), f"--workdir={workdir}"]
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    seed = random.randrange(1 << 32) if FLAGS.strike_seed is None else FLAGS.strike_seed
    print(f"{FLAGS.kills} kills and {FLAGS.hangs} hangs, --strike_seed={seed}", flush=True)
    begin = time.monotonic()
    log = play(run_config, command, folder, random.Random(seed))
    report = audit.check(folder / STORE, run_config.asynchrony.max_staleness)
    kills, hangs = (sum(fault["what"] == what for fault in log) for what in ("killed", "hung"))
    print(
        f"{kills} kills and {hangs} hangs in {time.monotonic() - begin:.0f} s; {report.consumed} "
        "of "
        f"{run_config.train.steps} steps, {report.groups} groups each used once, "
        f"{report.takeovers} taken over, "
        f"oldest token {report.staleness_max} versions old (bound "
        f"{run_config.asynchrony.max_staleness})"
    )
    problems = list(report.problems)
    if (kills, hangs) != (FLAGS.kills, FLAGS.hangs):
        problems.append(
            f"the run was over after {kills} of {FLAGS.kills} kills, {hangs} of {FLAGS.hangs} hangs"
        )
    problems += [f"nobody took over all from {fault['role']}" for fault in log if fault.get("left")]
    if report.consumed != run_config.train.steps:
        problems.append(f"{report.consumed} steps were consumed, not {run_config.train.steps}")
    replayed = subprocess.run(
        [sys.executable, "-m", "launch.replay", *command], cwd=ROOT, env=_environment(folder)
    )
    if replayed.returncode:
        problems.append("the replay differs")
    summary = {
        "seed": seed,
        "faults": log,
        "audit": dataclasses.asdict(report),
        "problems": problems,
    }
    write_atomically(folder / "faults.json", json.dumps(summary, indent=1).encode())
    if problems:
        raise FaultsError("; ".join(problems))
    print("every check passed")


def play(config: RunConfig, command: list[str], folder: Path, rng: random.Random) -> list[dict]:
    """Runs the roles to the end of training and strikes meanwhile; returns what was done when."""
    names = ["learner", *(f"actor-{i}" for i in range(FLAGS.actors))]
    roles = [_start(name, command, folder) for name in names]
    log: list[dict] = []
    begin = time.monotonic()
    deadline = begin + 60 * FLAGS.minutes
    victims = ["learner"] * -(-FLAGS.kills // 4) + ["actor"] * (FLAGS.kills - -(-FLAGS.kills // 4))
    faults = [("kill", victim) for victim in victims] + [("hang", "actor")] * FLAGS.hangs
    rng.shuffle(faults)
    # Faults are planned for the first half, so that the run has not ended before the last of them.
    steps = sorted(rng.uniform(-1.0, config.train.steps / 2) for _ in faults)
    due: float | None = None  # when the next fault falls, once its step is reached
    try:
        while any(role.supervisor.poll() is None for role in roles):
            now = time.monotonic()
            if now > deadline:
                raise FaultsError(
                    f"the run did not end within {FLAGS.minutes} minutes; see {folder}/*.log"
                )
            for role in roles:
                if role.supervisor.poll() not in (None, 0):
                    raise FaultsError(f"{role.name} gave up; see {folder / role.name}.log")
            if len(log) < len(faults) and due is None and _consumed(folder) >= steps[len(log)]:
                due = now + rng.uniform(0.0, FLAGS.delay_s)
            # Steps may be much shorter than the delay: it ends when half of what was left is done.
            if due is not None and (
                now >= due or 2 * _consumed(folder) >= steps[len(log)] + config.train.steps
            ):
                what, kind = faults[len(log)]
                alive = [role for role in roles if role.name.startswith(kind) and role.pid]
                if alive and (
                    fault := _kill(rng.choice(alive)) if what == "kill" else _hang(alive, folder)
                ):
                    log.append(fault | {"after_s": round(time.monotonic() - begin, 1)})
                    done = f"{_consumed(folder)} of {config.train.steps} steps"
                    print(f"{len(log)}/{len(faults)} {log[-1]}; {done}", flush=True)
                    due = None
            time.sleep(0.05)
    finally:
        for role in roles:
            if role.supervisor.poll() is None:
                os.killpg(role.supervisor.pid, signal.SIGKILL)
                role.supervisor.wait()
    return log


def _start(name: str, command: list[str], folder: Path) -> Role:
    role = ["--role=learner"] if name == "learner" else ["--role=actor", f"--name={name}"]
    with open(folder / f"{name}.log", "ab") as log:
        supervised = [
            "bash",
            "launch/supervise.sh",
            sys.executable,
            "-m",
            "launch.train",
            *role,
            *command,
        ]
        environment = _environment(folder) | {"SUPERVISE_PAUSE_S": "0.2"}
        started = subprocess.Popen(
            supervised,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Role(name, started)


def _kill(role: Role) -> dict | None:
    """Kills a role at once, with all that it has started; None if it has just ended."""
    pid = role.pid
    if not pid:
        return None
    for child in _descendants(pid):
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return {"role": role.name, "what": "killed"}


def _hang(actors: list[Role], folder: Path) -> dict | None:
    """Stops the actor that holds most until others have taken that over; None while nobody holds
    anything.
    """
    held = {role.name: _held(folder, role.name) for role in actors}
    victim = max(actors, key=lambda role: len(held[role.name]))
    pid = victim.pid
    # 0, of a process that has just ended, would be this program's own group
    if not held[victim.name] or not pid:
        return None
    try:
        os.kill(pid, signal.SIGSTOP)
        held = _held(folder, victim.name)
        begin = time.monotonic()
        deadline = Deadline(_TAKEOVER_S)
        deadline.wait(lambda: not held & _held(folder, victim.name))
        left = held & _held(folder, victim.name)
    except ProcessLookupError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    if not held:  # it has just delivered
        return None
    seconds = round(time.monotonic() - begin, 1)
    return {
        "role": victim.name,
        "what": "hung",
        "held": len(held),
        "left": len(left),
        "seconds": seconds,
    }


def _held(folder: Path, actor: str) -> set[tuple[int, int]]:
    """The items that an actor has claimed and not delivered, by step and number."""
    if not steps_lib.exists(folder / STORE):
        return set()
    store = GroupStore(folder / STORE)
    found = set()
    for step in steps_lib.steps(store.folder):  # in folders: what is in shards is consumed
        listing = store.reader.listing(step)
        if listing is None or listing.consumed:
            continue
        for item in store.items(step, listing):
            holder = store.holder(item, listing)
            if item.number not in listing.groups and holder is not None and holder.name == actor:
                found.add((step, item.number))
    return found


def _descendants(pid: int) -> list[int]:
    """A process and all below it, itself first."""
    found = [pid]
    index = 0
    while index < len(found):
        path = Path(f"/proc/{found[index]}/task/{found[index]}/children")
        try:
            found += [int(child) for child in path.read_text().split()]
        except OSError:
            pass
        index += 1
    return found


def _consumed(folder: Path) -> int:
    """Steps whose groups are used up."""
    store = folder / STORE
    if not steps_lib.exists(store):
        return 0
    return len(GroupStore(store).consumed())


def _environment(folder: Path) -> dict[str, str]:
    """Restarts find what they compiled before."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    flags_kept = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "host_platform_device_count" not in flag
    ]
    return os.environ | kept | {"XLA_FLAGS": " ".join(flags_kept)}


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, expected=(FaultsError,))
