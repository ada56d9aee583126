"""Lists the changes that solved trajectories of a run did not need.

    python -m launch.review runs/first --step=40
    python -m launch.review runs/first --step=40 --task=3

Each hunk of a solved trajectory's diff is reverted, and what is left is graded again. A hunk
without which the task is still solved is needless. The calls on record are carried out again, in
sandboxes, so no model is needed. --task is the number of a group in the step, or the id of its
task; all groups by default. The share of needless hunks by step says whether a policy learns to
change more than it must. --json=<file> keeps everything.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import rich.table
from absl import flags

from launch import command, trusted
from launch.step import STEP
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool, SandboxUnavailable
from rl_code.environment.tools.api import find_tools, offered
from rl_code.metrics.progress import Progress
from rl_code.recording import kept_config
from rl_code.recording.replay_training import on_record
from rl_code.recording.replay_trajectories import find
from rl_code.recording.review import Review, review
from rl_code.run.workdir import STORE
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.types import Group


def main(argv: list[str]) -> None:
    if len(argv) != 2 or STEP.value is None:
        command.refuse("name a run and a step, as in python -m launch.review runs/first --step=40")
    trusted.take(sys.argv)
    jax.config.update("jax_platforms", "cpu")  # no device is needed
    workdir = Path(argv[1])
    try:
        config = kept_config.read(workdir)
        groups = recorded(workdir)
        tools = find_tools(config.tools)
        verbose = find_protocol(config.protocol, tools, "config.protocol").verbose
        reviews: list[Review] = []
        with (
            SandboxPool(config.sandbox) as pool,
            Progress("review", len(groups), compiles=False) as progress,
        ):
            for number, group in enumerate(groups, 1):
                own = offered(group.task, tools)
                found = review(
                    group.task, group.trajectories, own, pool, config.limits, verbose=verbose
                )
                reviews += found
                progress.update(number)
    except ConfigError as error:
        command.refuse(str(error))
    except (StoreError, SandboxUnavailable, SandboxFault) as error:
        sys.exit(str(error))
    tell(reviews)
    if flags.FLAGS.json:
        records = [dataclasses.asdict(one) for one in reviews]
        Path(flags.FLAGS.json).write_text(json.dumps(records, indent=1) + "\n")


def recorded(workdir: Path) -> list[Group]:
    """The groups that the flags name. Raises ConfigError, which says what there is."""
    step = STEP.value
    if flags.FLAGS.task is not None:
        return [find(workdir, step, flags.FLAGS.task).record.group]
    store = GroupStore(workdir / STORE)
    if not store.is_consumed(step):
        raise ConfigError(f"--step={step}: not on record in {workdir}; {on_record(workdir)}")
    items = [item for item in store.items(step) if item.trained]
    return [store.record(step, item.number).group for item in items]


def tell(reviews: list[Review]) -> None:
    """Prints the needless hunks, then how many there are."""
    console = command.console()
    table = rich.table.Table("task", "sample", "file", "needless hunk")
    for one in reviews:
        for hunk, needless in zip(one.hunks, one.needless, strict=True):
            if needless:
                place = f"{hunk.path}:{hunk.now_at + 1}"
                table.add_row(one.task_id, str(one.index), place, "\n".join(hunk.diff))
        if one.cause:
            table.add_row(one.task_id, str(one.index), "", f"not reviewed: {one.cause}")
    if table.row_count:
        console.print(table)
    every = [mark for one in reviews for mark in one.needless]
    share = f"{100 * sum(every) / len(every):.1f} %" if every else "none to look at"
    console.print(
        f"{len(reviews)} solved trajectories, {len(every)} hunks, {sum(every)} of them needless "
        f"({share})",
        highlight=False,
    )


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_string("task", None, "Number of a group, or id of its task; all by default.")
    flags.DEFINE_string("json", None, "File for all hunks.")


if __name__ == "__main__":
    define_flags()
    command.run(main, arguments=True)
