"""Tries known ways to cheat and to escape, and says what each of them earned and harmed.

    python -m launch.redteam                    # all of it
    python -m launch.redteam --only=cheats      # or open, alone, episodes, escapes, honest
    python -m launch.redteam --markdown         # the table of docs/redteam.md
    python -m launch.redteam --json=out.json    # every outcome
    python -m launch.redteam --only=sessions --cases=cases.jsonl    # of launch.make_case
    python -m launch.redteam --only=chooser     # how well canaries hide, in minutes
    python -m launch.redteam --harbor=tasks     # what graders of these tasks pay for
    python -m launch.redteam --swe=tasks.jsonl --settings='{"places": {"repositories": "repos"}}'
    python -m launch.redteam --verifiers=my_taskset --settings='{"python": "vf/bin/python"}'

Cheats are handed in to each grader that they say something to, and some through whole episodes of a
scripted policy. The column "suite alone" is a suite without canaries and without values checked by
the split grader; "open" are forgers that are paid, on suites that launch.validate reports or by a
guess that costs more than it wins. Escapes run in a sandbox, and the host looks for what they have
done. References of tasks of every source are graded, too. It ends with code 1 if a cheat earns more
than an honest failure, an escape does harm, or a reference does not pass. The chooser is a small
classifier that learns from the tests of other packages which of several copies is the real test; it
is tried where --only names it.

With --harbor or --swe cheats are tried on tasks of others instead (docs/foreign_tasks.md). One
table ranks graders by what they pay for, another says which grader pays for which cheat and how it
is closed, and what follows names solutions and tests that lie in the world that an agent sees.
--settings, --first, --layers and --seconds are those of launch.validate; packages are pytest's and
the layer store a temporary one where they name none.
It ends with code 1 if a grader of this project's pays for a cheat.

With --verifiers the rewards of tasksets of the package verifiers are tried: messages that know
nothing about a task, and the commands of --harbor where a task offers bash. --settings are those of
the source verifiers. It ends with code 1 if a reward pays for a cheat.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import rich.box
import rich.console
import rich.table
from absl import flags

from benchmarks.results import JSON
from launch import command, redteam_tasks
from rl_code.environment.layers import installed
from rl_code.environment.layers.packages import PackagesError
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.inside.world import PACKAGES
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool, SandboxUnavailable
from rl_code.redteam import chooser, honest, recorded
from rl_code.redteam.escapes import Host
from rl_code.redteam.ground import (
    FIXTURE_ROWS,
    FIXTURES,
    GRADERS,
    MIXED,
    ROWS,
    SUBTESTS,
    TRUTHS,
)
from rl_code.redteam.trial import ALONE, EPISODES, Outcome, Trial
from rl_code.types import Layer, World

PARTS = ("cheats", "open", "alone", "episodes", "escapes", "honest", "sessions")
CHOOSER = "chooser"
_COLUMNS = (*GRADERS, FIXTURES, TRUTHS, ROWS, MIXED, SUBTESTS, FIXTURE_ROWS, ALONE, *EPISODES)

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum("only", None, (*PARTS, CHOOSER), "Only this part; may stand several times.")
flags.DEFINE_integer("references", 20, "References of each source that are graded.", 0)
flags.DEFINE_string("cases", None, "File of cases from recorded sessions.")
flags.DEFINE_multi_string(
    "known",
    [sysconfig.get_path("purelib"), str(Path(sysconfig.get_path("stdlib"), "test"))],
    "Folders with the tests that the chooser learns from.",
)
flags.DEFINE_multi_string("asked", ["tests"], "Folders with the tests that it chooses among.")
flags.DEFINE_integer("files", 400, "Files of either that are read, drawn at random.", 1)
flags.DEFINE_bool("markdown", False, "Print the table for the docs.")
flags.DEFINE_string("harbor", None, "Folder of tasks in Harbor's format to try cheats on.")
flags.DEFINE_string("swe", None, "File of rows in SWE-bench's format to try cheats on.")
flags.DEFINE_list("verifiers", None, "Tasksets of verifiers to try cheats on, with commas between.")


def main(argv: list[str]) -> None:
    given = {kind: FLAGS[kind].value for kind in ("harbor", "swe", "verifiers")}
    others = {kind: value for kind, value in given.items() if value is not None}
    if others and len(others) + bool(FLAGS.only) > 1:
        named = " and ".join(f"--{kind}" for kind in (*others, *(["only"] if FLAGS.only else [])))
        command.refuse(f"{named} cannot stand together: give one of them")
    for kind, value in others.items():
        if kind == "verifiers":
            if not value or "" in value:
                command.refuse(f"--verifiers={','.join(value)}: give ids of tasksets")
            sys.exit(redteam_tasks.run_environments(value))
        sys.exit(redteam_tasks.run(kind, value))
    parts = FLAGS.only or PARTS
    if CHOOSER in parts:
        choose()
        if parts == [CHOOSER]:
            return
    try:
        cases = recorded.read_cases(Path(FLAGS.cases)) if FLAGS.cases else []
    except (OSError, ValueError) as error:
        command.refuse(f"--cases={FLAGS.cases}: {error}")
    if "sessions" in (FLAGS.only or ()) and not cases:
        command.refuse("--only=sessions needs --cases=<file>, with cases of launch.make_case")
    try:
        waiting = rich.console.Console(stderr=True).status("")
        with tempfile.TemporaryDirectory() as folder, waiting:
            outcomes = []
            for outcome in tried(parts, Path(folder), FLAGS.references, cases):
                outcomes.append(outcome)
                waiting.update(f"{len(outcomes)} tried, {outcome.kind}: {outcome.name}")
    except (PackagesError, SandboxUnavailable) as error:
        command.refuse(str(error))
    if JSON.value:
        records = [{**dataclasses.asdict(one), "held": one.held} for one in outcomes]
        Path(JSON.value).write_text(json.dumps(records, indent=1))
    rows = table(outcomes)
    if FLAGS.markdown:
        print(markdown(rows))
    else:
        show(rows)
    print(summary(outcomes))
    sys.exit(not all(one.held for one in outcomes))


def choose() -> None:
    """Prints how often a chooser picks the real test among its copies."""
    known, asked = ([Path(one) for one in folders] for folders in (FLAGS.known, FLAGS.asked))
    try:
        scores, learned = chooser.measure(known, asked, FLAGS.files)
    except ValueError as error:
        command.refuse(str(error))
    shown = rich.table.Table("change", "groups", "right", "chance", box=rich.box.SIMPLE)
    for one in scores:
        shares = [f"{100 * part / one.groups:.1f} %" for part in (one.right, one.chance)]
        shown.add_row(one.kind, str(one.groups), *shares)
    command.console().print(f"A chooser that learned from {learned} groups of other tests:")
    command.console().print(shown)


def tried(
    parts: Sequence[str], folder: Path, references: int, cases: Sequence[recorded.Case] = ()
) -> Iterator[Outcome]:
    """The outcomes of these parts. folder: for layers and what escapes look for. cases: from
    recorded sessions. Raises PackagesError, SandboxUnavailable.
    """
    store = LayerStore(folder / "layers")
    world = World((Layer(installed.build(store), PACKAGES),))
    with SandboxPool(config(store)) as pool:
        trial = Trial(pool, world)
        if "cheats" in parts:
            yield from trial.cheats()
        if "open" in parts:
            yield from trial.open()
        if "alone" in parts:
            yield from trial.alone()
        if "episodes" in parts:
            yield from trial.episodes()
        if "escapes" in parts:
            with Host(folder, store, world) as host:
                yield from trial.escapes(host)
        if "sessions" in parts:
            yield from recorded.outcomes(cases, pool)
        if "honest" in parts:
            data = os.environ.get("RL_CODE_DATA", "")
            yield from honest.outcomes(pool, world, references, data)


def config(store: LayerStore) -> SandboxConfig:
    """Limits like those of a run with suites."""
    return SandboxConfig(
        workers=2, memory_mb=512, processes=24, workspace_mb=16, cpu_s=10, layers=str(store.folder)
    )


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for each attempt: what it is, what it earned at each place, flags, harm."""
    rows: dict[tuple[str, str], dict[str, Outcome]] = collections.defaultdict(dict)
    for one in outcomes:
        if one.kind not in ("honest", "open"):
            rows[one.kind, one.name][one.against] = one
    lines = [["", "attempt", *_COLUMNS, "flags", "harm"]]
    for (kind, name), found in rows.items():
        earned = [found[place].earned if place in found else None for place in _COLUMNS]
        paid = ["" if one is None else f"{one:g}" for one in earned]
        flags_ = sorted({flag for one in found.values() for flag in one.flags})
        harm = sorted({text for one in found.values() for text in one.harm})
        lines.append([kind, name, *paid, ", ".join(flags_), "; ".join(harm) or "none"])
    return lines


def summary(outcomes: Sequence[Outcome]) -> str:
    """Summary of all of it, in words."""
    broken = [one for one in outcomes if not one.held]
    cheats = [one for one in outcomes if one.kind not in ("escape", "honest", "open")]
    escapes = sum(one.kind == "escape" for one in outcomes)
    honest = [one for one in outcomes if one.kind == "honest"]
    proven = {one.name for one in cheats if one.against == "suite" and one.proven_by_canary}
    paid = {one.name for one in cheats if one.against == ALONE and (one.earned or 0) > 0.5}
    tried = len({(one.kind, one.name) for one in cheats})
    lines = [
        f"{tried} ways to cheat in {len(cheats)} attempts; {escapes} ways to escape; {len(honest)} "
        f"honest references, {sum(bool(one.harm) for one in honest)} of which do not pass.",
        f"Canaries prove {len(proven)} of the cheats. A suite alone pays {len(paid)} in full, of "
        f"which canaries prove {len(paid & proven)}.",
    ]
    lines += [
        f"open: {one.name!r} against {one.against} earns {one.earned:g} {', '.join(one.flags)}"
        for one in outcomes
        if one.kind == "open"
    ]
    lines += [
        f"BROKEN {one.kind} {one.name!r} against {one.against}: earned {one.earned}, an honest "
        f"failure {one.failure}; {'; '.join(one.harm)}"
        for one in broken
    ]
    return "\n".join(lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown."""
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest))


def show(rows: Sequence[Sequence[str]]) -> None:
    """Prints the table."""
    head, *rest = rows
    shown = rich.table.Table(*head, box=rich.box.SIMPLE)
    for row in rest:
        shown.add_row(*row)
    command.console().print(shown)


if __name__ == "__main__":
    command.run(main)
