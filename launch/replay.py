"""Repeats a run, or one trajectory of it, from its record, and says whether it comes out equal.

    python -m launch.replay runs/first --step=400 --task=17 --sample=3
    python -m launch.replay runs/first [--start=18 --end=36]

With --step one trajectory is sampled again, or without --sample the whole group: with the versions
of the weights that sampled it, and with the tools running for real. The first difference is told
(a token, a log-probability, a tool's result, the reward); what is equal is printed. --task is the
number of the group in the step, or the id of its task. Weights that are kept nowhere any more are
made again from the nearest checkpoint.

Without --step the learner trains again on the groups in the store, and every step must give the
same weights. The store is checked first: every planned group is there, was consumed once, and none
is older than the bound.

The config is the run's own; it may also be given by --config and --workdir, with the overrides of
the run. Exits with 1 when anything differs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_collections
from absl import flags as absl_flags

from launch import flags
from launch.step import STEP
from models.sharding import MeshConfig
from models.tokenizer import Tokenizer
from rl_code.checkpoint import checkpoint
from rl_code.config import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.host.stop import StopRequest
from rl_code.metrics.progress import Progress
from rl_code.recording.replay_training import on_record, replay, same_bits
from rl_code.recording.replay_trajectories import Again, find, play_again
from rl_code.rollout.playing import RolloutTimeout
from rl_code.run import lineage, origin
from rl_code.run.config import RunConfig, meshes
from rl_code.run.run import Run
from rl_code.run.workdir import STORE, check
from rl_code.store import audit
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.types import Turn
from rl_code.weights.versions import WeightError

START = absl_flags.DEFINE_integer(
    "start", 0, "First step: 0, or that of a checkpoint in the workdir.", 0
)
END = absl_flags.DEFINE_integer(
    "end", None, "Step to stop before; all finished ones by default.", 1
)
TASK = absl_flags.DEFINE_string("task", "0", "With --step: number of the group, or id of its task.")
SAMPLE = absl_flags.DEFINE_integer(
    "sample",
    None,
    "With --step: place of the trajectory in its group, continuations behind the others; all by "
    "default.",
    0,
)
# Tokens of context that are shown before a difference.
_AROUND = 24


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    refuse_flags_of_the_other_way()
    run_config = read_config.build(RunConfig, config)
    folder = Path(workdir or flags.run_folder())
    check(folder, run_config)
    if STEP.value is None:
        equal = repeat_training(run_config, folder)
    else:
        equal = repeat_sampling(run_config, folder)
    sys.exit(0 if equal else 1)


def refuse_flags_of_the_other_way() -> None:
    """Raises ConfigError for a flag that would have no effect."""
    names = ("task", "sample") if STEP.value is None else ("start", "end")
    flag = next((absl_flags.FLAGS[name] for name in names if absl_flags.FLAGS[name].present), None)
    if flag is None:
        return
    if STEP.value is None:
        raise read_config.ConfigError(
            f"--{flag.name}={flag.value} says what is sampled again of a step; name it by --step"
        )
    raise read_config.ConfigError(
        f"--{flag.name}={flag.value} bounds the training that is repeated without --step"
    )


def repeat_sampling(own: RunConfig, workdir: Path) -> bool:
    """Samples again what the flags name; whether all of it is equal."""
    found = find(workdir, STEP.value, TASK.value)
    count = len(found.record.group.all)
    if SAMPLE.value is not None and SAMPLE.value >= count:
        raise read_config.ConfigError(
            f"--sample={SAMPLE.value}: the group has {count} trajectories, numbered from 0"
        )
    samples = range(count) if SAMPLE.value is None else [SAMPLE.value]
    config = lineage.config_at(workdir, own, STEP.value)
    # the devices that sample, and those on which weights may be made again
    use_devices(workdir, own, meshes(config, found.role))
    tokenizer = origin.tokenizer_of(workdir)
    print(
        f"step {STEP.value}, group {found.item.number}: {found.record.group.task.id}, sampled by "
        f"{found.record.actor} with weights of versions {list(found.record.versions)}"
    )
    equal = True
    with StopRequest():  # SIGTERM ends it as Ctrl-C does
        for again in play_again(config, workdir, found, samples):
            equal = equal and again.difference is None
            tell(again, tokenizer, whole=SAMPLE.value is not None)
    print("replayed: equal, token for token" if equal else "replayed: not equal")
    return equal


def tell(again: Again, tokenizer: Tokenizer, *, whole: bool) -> None:
    """Prints what came out; the trajectory itself where it is equal and ``whole`` is asked for."""
    recorded = again.recorded
    if (difference := again.difference) is not None:
        print(str(difference))
        if difference.place is not None:
            for name, one in (("there", recorded), ("here", again.now)):
                text = tokenizer.decode(
                    one.tokens[max(0, difference.place - _AROUND) : difference.place + 1].tolist()
                )
                print(f"  {name}: ...{text!r}")
        return
    if whole:
        for turn in recorded.turns:
            print(shown(turn))
        print("---")
    answers = sum(len(turn.results) for turn in recorded.turns)
    print(
        f"sample {recorded.index} is equal: {len(recorded.tokens)} tokens, of which "
        f"{int(recorded.sampled.sum())} were sampled with the same log-probabilities; {answers} "
        f"results of tools; {recorded.status}, reward {recorded.reward.total:g}"
    )


def shown(turn: Turn) -> str:
    """A turn for people. What tools answered to the last message has no tokens, since the model
    never read it, so their results are told.
    """
    if turn.end > turn.start:
        return f"--- {turn.role}, tokens {turn.start} to {turn.end - 1}\n{turn.text}"
    answers = [f"{result.name}: {result.content}" for result in turn.results]
    return "\n".join([f"--- {turn.role}, not read by the model", *answers])


def repeat_training(run_config: RunConfig, workdir: Path) -> bool:
    """Trains again on the recorded groups; whether the store is sound and all weights are equal."""
    consumed = GroupStore(workdir / STORE).consumed()
    if not [step for step in consumed if START.value <= step < (END.value or math.inf)]:
        end = "" if END.value is None else f" --end={END.value}"
        raise read_config.ConfigError(
            f"--start={START.value}{end}: no finished step of {workdir} lies there; "
            f"{on_record(workdir)}"
        )
    use_devices(workdir, run_config)
    with (
        Run(run_config, workdir, "learner") as run,
        jax.set_mesh(run.mesh),
        StopRequest(),
    ):
        bound = lineage.max_staleness(workdir, run_config)
        report = audit.check(run.workdir / STORE, bound)
        print(
            f"{report.consumed} of {report.steps} steps consumed, {report.groups} groups, "
            f"{report.takeovers} taken "
            f"over, oldest token {report.staleness_max} versions old (bound {bound})"
        )
        if report.removed is not None:
            print(report.removed)
        for problem in report.problems:
            print(f"problem: {problem}")
        last = None
        differing = []
        with Progress("replay", (END.value or report.consumed) - START.value) as progress:
            for step in replay(run, START.value, END.value):
                last = step
                differing += [] if step.same else [step]
                progress.update(step.step + 1 - START.value)
        for step in differing[:5]:
            print(f"step {step.step}: weights {step.then} then, {step.now} now")
        equal = not differing
        if last is not None and last.step + 1 in checkpoint.steps(workdir):
            stored = checkpoint.load(workdir, last.state, step=last.step + 1)
            same = same_bits(stored.state, last.state)
            equal = equal and same
            print(
                f"the checkpoint of step {last.step + 1} {'equals' if same else 'differs from'} "
                "the replayed state"
            )
        print("replayed: equal, bit for bit" if equal else "replayed: not equal")
    return equal and not report.problems


def use_devices(workdir: Path, own: RunConfig, *others: Sequence[MeshConfig]) -> None:
    """Has as many devices as the learner had in any step of the run, or as other meshes need."""
    learners = [meshes(config, "learner") for config in lineage.configs(workdir, own)]
    flags.use_virtual_devices(*max([*learners, *others], key=flags.devices_of))


if __name__ == "__main__":
    flags.run(
        main,
        kind=RunConfig,
        runs=True,
        needs_workdir=lambda: flags.run_folder() is None,
        expected=(SandboxUnavailable, StoreError, WeightError, RolloutTimeout),
    )
