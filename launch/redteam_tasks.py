"""The part of launch.redteam that tries cheats on tasks of others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from absl import flags

from benchmarks.results import JSON
from launch import command, task_flags
from launch.task_flags import FIRST, LAYERS, SECONDS, SETTINGS, limits_of_tests
from rl_code.config.named import Named
from rl_code.environment.layers import installed
from rl_code.environment.layers.packages import PackagesError
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool, SandboxUnavailable
from rl_code.environment.suite_grader import SuiteError
from rl_code.harness.agent import HarnessError
from rl_code.harness.harness import Harness
from rl_code.harness.verifiers import Verifiers
from rl_code.host.stop import INTERRUPTED
from rl_code.metrics.progress import Progress
from rl_code.redteam import environments, foreign
from rl_code.redteam.foreign import ALONE, AS_HARBOR, AS_SWE, Left, Paid
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Refusal, SourceOfWorlds

FLAGS = flags.FLAGS
# Graders that are tried for comparison, and pay nobody here.
_COMPARED = (AS_HARBOR, AS_SWE, ALONE)


def run(kind: str, path: str) -> int:
    """Tries cheats on the tasks at a path, prints the tables, and returns the exit code.

    kind: "harbor" or "swe", a source of tasks.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = LayerStore(LAYERS.value or folder)
            settings = {"path": path, **_settings(store)}
            source = find_source(Named(kind, settings), f"--{kind}")
            assert isinstance(source, SourceOfWorlds)  # as both kinds are
            config = SandboxConfig(
                memory_mb=1024,
                processes=64,
                workspace_mb=64,
                cpu_s=max(1, round(SECONDS.value)),
                output_bytes=1 << 20,
                layers=str(store.folder),
            )
            with SandboxPool(config) as pool:
                attempts, left, refused, finished = _try(source, pool, Path(folder))
        except (PackagesError, SandboxUnavailable, OSError, ValueError) as error:
            command.refuse(f"--{kind}={path}: {error}")
    if JSON.value:
        records = {
            "attempts": [{**dataclasses.asdict(one), "paid": one.paid} for one in attempts],
            "left_over": [dataclasses.asdict(one) for one in left],
            "refused": refused,
        }
        Path(JSON.value).write_text(json.dumps(records, indent=1))
    _show(attempts, left, refused)
    if not finished:
        print("stopped: these are the attempts so far")
        return INTERRUPTED
    own = [one for one in attempts if one.grader not in _COMPARED]
    return int(any(one.paid for one in own if one.is_cheat))


def run_environments(names: Sequence[str]) -> int:
    """Tries cheats on the rewards of tasksets of verifiers, prints the tables, and returns the exit
    code, which is 1 if one is paid for.
    """
    attempts: list[Paid] = []
    refused: dict[str, str] = {}
    finished = False
    try:
        settings = task_flags.settings()
        tasks = {
            name: find_source(
                Named("verifiers", {**settings, "taskset": name}), "--verifiers"
            ).load(None, None)
            for name in names
        }
        tasks = {name: own[: FIRST.value or len(own)] for name, own in tasks.items()}
        count = sum(map(len, tasks.values()))
        with (
            contextlib.closing(Harness(Verifiers())) as harness,
            SandboxPool(SandboxConfig()) as pool,
            Progress("cheats", count, compiles=False) as progress,
            contextlib.suppress(KeyboardInterrupt),
        ):
            for task, name in [(task, name) for name, own in tasks.items() for task in own]:
                try:
                    for one in environments.tried(task, name, pool, harness):
                        attempts.append(one)
                        done = len({each.task for each in attempts}) - 1
                        progress.update(done, task=task.id, cheat=one.attempt)
                except HarnessError as error:
                    refused[task.id] = str(error)
            finished = True
    except (SandboxUnavailable, OSError, ValueError) as error:
        command.refuse(f"--verifiers={','.join(names)}: {error}")
    if JSON.value:
        records = [{**dataclasses.asdict(one), "paid": one.paid} for one in attempts]
        Path(JSON.value).write_text(json.dumps({"attempts": records, "refused": refused}, indent=1))
    said = [(one.name, one.close) for one in environments.CHEATS]
    tables = (foreign.ranked(attempts), foreign.by_cheat(attempts, said)) if attempts else ()
    _show_tables(attempts, tables, refused)
    for id, why in refused.items():
        print(f"{id}: not tried: {why}")
    if not finished:
        print("stopped: these are the attempts so far")
        return INTERRUPTED
    return int(any(one.paid for one in attempts if one.is_cheat))


def _settings(store: LayerStore) -> dict[str, Any]:
    """Settings of the source, with a folder of pytest where they name no packages and no images.
    Raises ValueError, PackagesError.
    """
    settings = task_flags.settings()
    if not isinstance(settings.get("places", {}), dict):
        raise ValueError(f"--settings={SETTINGS.value!r}: its places must be an object")
    places = dict(settings.get("places", {}))
    if not places.get("packages") and not places.get("images"):
        places["packages"] = str(store.folder / store.tree(installed.build(store)))
    return {**settings, "places": places}


def _try(
    source: SourceOfWorlds, pool: SandboxPool, folder: Path
) -> tuple[list[Paid], list[Left], dict[str, str], bool]:
    """The attempts, what is left over, why tasks cannot be tried, by id, and False if Ctrl-C came
    before the last.
    """
    attempts: list[Paid] = []
    left: list[Left] = []
    refused: dict[str, str] = {}
    count = min(source.count(), FIRST.value or source.count())
    with (
        Progress("cheats", count, compiles=False) as progress,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for number, (id, task) in enumerate(source.load_each(pool, folder), start=1):
            if number > count:
                break
            if isinstance(task, Refusal):
                refused[id] = str(task)
                continue
            try:
                left += foreign.left_over(task, pool)
                for one in foreign.tried(task, pool, limits_of_tests()):
                    attempts.append(one)
                    progress.update(number - 1, task=id, cheat=one.attempt)
            except SuiteError as error:
                refused[id] = str(error)
            progress.update(number)
        return attempts, left, refused, True
    return attempts, left, refused, False


def _show(attempts: Sequence[Paid], left: Sequence[Left], refused: dict[str, str]) -> None:
    """Prints the tables."""
    tables = (foreign.ranked(attempts), foreign.by_cheat(attempts)) if attempts else ()
    _show_tables(attempts, tables, refused)
    for one in left:
        print(f"{one.task}: the agent's world holds the {one.what} {one.path}: {one.found}")
    if attempts and not left:
        print("No solution and no hidden test lies, whole, in a world that an agent sees.")
    for id, why in refused.items():
        print(f"{id}: not tried: {why}")


def _show_tables(
    attempts: Sequence[Paid], tables: Sequence[list[list[str]]], refused: dict[str, str]
) -> None:
    """Prints how many tasks were tried, and tables with their first row as the head."""
    console = command.console()
    tasks = len({one.task for one in attempts})
    console.print(f"{tasks} tasks tried, {len(refused)} not.")
    for rows in tables:
        if FLAGS.markdown:
            lines = ["| " + " | ".join(row) + " |" for row in rows]
            lines.insert(1, "|---" * len(rows[0]) + "|")
            print("\n" + "\n".join(lines))
            continue
        shown = rich.table.Table(*rows[0], box=rich.box.SIMPLE)
        for row in rows[1:]:
            shown.add_row(*row)
        console.print(shown)
