"""Kills a learner and its actors at random moments, then proves that nothing was lost or changed.

    python -m launch.faults --config=configs/faults.py --workdir=runs/faults --kills=30 --hangs=3

Each role runs under launch/supervise.sh, which starts it again. Every kill is a SIGKILL of one role
and all its children, sandboxes included. It comes some seconds after a random step, even while that
role or another is just starting. One kill in four strikes the learner. Between kills, actors are
stopped (SIGSTOP) until others have taken over all that they held. When the run has ended, its store
is audited and replayed: nothing may be lost, repeated or changed.

With --ray_nodes=3 the roles run by launch.on_ray on a simulated cluster. Hangs then strike the
learner too and last until the process is replaced, and --node_losses and --head_losses kill nodes
with all that runs there, and the head. --storage_ms makes the storage slow all the time.
"""

from __future__ import annotations

import collections
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

from cluster.fault_stages import OnRay, Stage, Supervised, environment
from cluster.kills import kill_all
from launch import flags
from rl_code.config import read_config
from rl_code.host.files import write_atomically
from rl_code.run.config import RunConfig, refuse_sync
from rl_code.run.workdir import LEARNER, STORE
from rl_code.store import audit
from rl_code.store import steps as steps_lib
from rl_code.store.missing import holders
from rl_code.store.store import GroupStore
from rl_code.weights.waiting import Deadline

ROOT = Path(__file__).resolve().parents[1]
# Seconds within which others must have taken over what a hung actor held, even if they are just
# starting.
_TAKEOVER_S = 120.0
FLAGS = absl_flags.FLAGS
absl_flags.DEFINE_integer(
    "ray_nodes", 0, "Nodes of a simulated Ray cluster that runs the roles; 0 for none.", 0
)
absl_flags.DEFINE_integer("node_losses", 0, "Nodes of it that are killed and replaced.", 0)
absl_flags.DEFINE_integer("head_losses", 0, "How often its head is.", 0)
absl_flags.DEFINE_float(
    "storage_ms",
    0.0,
    "Mean delay of an operation on what roles share; one in 500 takes a hundred times as long.",
    0.0,
)
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


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    refuse_sync(run_config)
    if FLAGS.hangs and FLAGS.actors < 2:
        raise read_config.ConfigError(
            f"--hangs={FLAGS.hangs} --actors={FLAGS.actors}: nobody could take over"
        )
    if (FLAGS.node_losses or FLAGS.head_losses) and FLAGS.ray_nodes < 2:
        raise read_config.ConfigError(
            f"--ray_nodes={FLAGS.ray_nodes}: --node_losses and --head_losses need at least 2 nodes"
        )
    # the roles end with this program, however it is stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path = config_flags.get_config_filename(FLAGS["config"])
    command = [f"--config={path}", *flags.overrides(), f"--workdir={Path(workdir).resolve()}"]
    folder = Path(workdir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    seed = random.randrange(1 << 32) if FLAGS.strike_seed is None else FLAGS.strike_seed
    print(f"{FLAGS.kills} kills and {FLAGS.hangs} hangs, --strike_seed={seed}", flush=True)
    begin = time.monotonic()
    with stage_of(command, folder) as stage:
        log = play(run_config, stage, folder, random.Random(seed))
    report = audit.check(folder / STORE, run_config.asynchrony.max_staleness)
    struck = collections.Counter(fault["what"] for fault in log)
    counts = ", ".join(f"{struck[what]} {what}" for what in wanted_faults())
    print(
        f"{counts} in {time.monotonic() - begin:.0f} s; {report.consumed} "
        "of "
        f"{run_config.train.steps} steps, {report.groups} groups each used once, "
        f"{report.takeovers} taken over, "
        f"oldest token {report.staleness_max} versions old (bound "
        f"{run_config.asynchrony.max_staleness})"
    )
    problems = list(report.problems)
    problems += [
        f"the run was over after {struck[what]} of {count} {what}"
        for what, count in wanted_faults().items()
        if struck[what] != count
    ]
    problems += [f"nobody took over all from {fault['role']}" for fault in log if fault.get("left")]
    if report.consumed != run_config.train.steps:
        problems.append(f"{report.consumed} steps were consumed, not {run_config.train.steps}")
    replayed = subprocess.run(
        [sys.executable, "-m", "launch.replay", *command], cwd=ROOT, env=environment(folder)
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


def stage_of(command: list[str], folder: Path) -> Stage:
    """Starts the roles."""
    variables = environment(folder, FLAGS.storage_ms)
    if FLAGS.ray_nodes:
        return OnRay(folder, FLAGS.actors, variables, command, FLAGS.ray_nodes)
    return Supervised(folder, FLAGS.actors, variables, command)


def wanted_faults() -> dict[str, int]:
    """Targets of strikes, as the log calls it -> how often."""
    found = {"killed": FLAGS.kills, "hung": FLAGS.hangs}
    if FLAGS.ray_nodes:
        found |= {"node lost": FLAGS.node_losses, "head lost": FLAGS.head_losses}
    return found


def planned(rng: random.Random) -> list[tuple[str, str]]:
    """(what, kind of role) of every fault, in random order."""

    def shared(count: int, learners: int) -> list[str]:
        return ["learner"] * learners + ["actor"] * (count - learners)

    faults = [("kill", role) for role in shared(FLAGS.kills, -(-FLAGS.kills // 4))]
    # Without Ray nobody starts a learner again that hangs.
    learners = -(-FLAGS.hangs // 4) if FLAGS.ray_nodes else 0
    faults += [("hang", role) for role in shared(FLAGS.hangs, learners)]
    faults += [("node", "")] * FLAGS.node_losses + [("head", "")] * FLAGS.head_losses
    rng.shuffle(faults)
    return faults


def play(config: RunConfig, stage: Stage, folder: Path, rng: random.Random) -> list[dict]:
    """Watches the roles to the end of training and strikes; returns what was done when."""
    log: list[dict] = []
    begin = time.monotonic()
    deadline = begin + 60 * FLAGS.minutes
    faults = planned(rng)
    # Faults are planned for the first half, so that the run has not ended before the last of them.
    steps = sorted(rng.uniform(-1.0, config.train.steps / 2) for _ in faults)
    due: float | None = None  # when the next fault falls, once its step is reached
    while stage.running():
        now = time.monotonic()
        if now > deadline:
            raise FaultsError(
                f"the run did not end within {FLAGS.minutes} minutes; see the logs in {folder}"
            )
        if gone := stage.gave_up():
            raise FaultsError(f"{gone} gave up; see the logs in {folder}")
        stage.note_returns()
        if len(log) < len(faults) and due is None and consumed(folder) >= steps[len(log)]:
            due = now + rng.uniform(0.0, FLAGS.delay_s)
        # Steps may be much shorter than the delay: it ends when half of what was left is done.
        if due is not None and (
            now >= due or 2 * consumed(folder) >= steps[len(log)] + config.train.steps
        ):
            fault = strike(stage, *faults[len(log)], folder, rng)
            if fault is not None:
                log.append(fault)
                fault["after_s"] = round(time.monotonic() - begin, 1)
                done = f"{consumed(folder)} of {config.train.steps} steps"
                print(f"{len(log)}/{len(faults)} {fault}; {done}", flush=True)
                due = None
        time.sleep(0.05)
    return log


def strike(stage: Stage, what: str, kind: str, folder: Path, rng: random.Random) -> dict | None:
    """One fault, as it goes into the log; None if nothing could be struck just now."""
    if what == "node":
        return stage.lose_node(rng)
    if what == "head":
        return stage.lose_head()
    alive = [name for name in stage.names if name.startswith(kind) and stage.pid(name)]
    if not alive:
        return None
    if what == "kill":
        return _kill(stage, rng.choice(alive))
    return _hang(stage, alive, folder)


def _kill(stage: Stage, name: str) -> dict | None:
    """Kills a role at once, with all that it has started; None if it has just ended."""
    pid = stage.pid(name)
    if not pid:
        return None
    fault: dict = {"role": name, "what": "killed"}
    stage.expect_return(name, pid, fault)
    kill_all(pid)
    return fault


def _hang(stage: Stage, alive: list[str], folder: Path) -> dict | None:
    """Stops the role that holds most until others have taken that over, and on Ray until it is
    started again; None while no actor holds anything.
    """
    holds = {name: held(folder, name) for name in alive}
    victim = max(alive, key=lambda name: len(holds[name]))
    pid = stage.pid(victim)
    # 0, of a process that has just ended, would be this program's own group
    if not pid or (victim != LEARNER and not holds[victim]):
        return None
    fault: dict = {"role": victim, "what": "hung"}
    try:
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        if stage.replaces_hung:
            stage.expect_return(victim, pid, fault)
        stopped_with = held(folder, victim)
        deadline = Deadline(_TAKEOVER_S)

        def taken_over() -> bool:
            stage.note_returns()  # of those that were struck before
            return not stopped_with & held(folder, victim)

        deadline.wait(taken_over)
        left = stopped_with & held(folder, victim)
    except ProcessLookupError:
        return None
    finally:
        if not stage.replaces_hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    if victim != LEARNER and not stopped_with:  # it has just delivered
        return None
    seconds = round(time.monotonic() - begin, 1)
    fault.update(held=len(stopped_with), left=len(left), seconds=seconds)
    return fault


def held(folder: Path, actor: str) -> set[tuple[int, int]]:
    """The items that an actor has claimed and not delivered, by step and number."""
    if not steps_lib.exists(folder / STORE):
        return set()
    store = GroupStore(folder / STORE)
    found = set()
    for step in steps_lib.steps(store.folder):  # in folders: what is in shards is consumed
        listing = store.reader.listing(step)
        if listing is None or listing.consumed:
            continue
        delivered = store.reader.groups(step, listing)
        for number, holder in holders(store.reader, step, listing).items():
            if number not in delivered and holder is not None and holder.name == actor:
                found.add((step, number))
    return found


def consumed(folder: Path) -> int:
    """Steps whose groups are used up."""
    store = folder / STORE
    if not steps_lib.exists(store):
        return 0
    return len(GroupStore(store).consumed())


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, expected=(FaultsError,))
