"""Checks tasks of a source: they fail before the work, pass with the reference, the same each time.

    python -m launch.validate humaneval
    python -m launch.validate swe --layers=runs/layers --verdicts=runs/working.json --settings='
        {"path": "tasks.jsonl", "places": {"repositories": "repos", "packages": "pytest.lock"}}'
    python -m launch.validate my_config.py          # tasks and suites of a config

Prints one table: how many tasks work, and by reason which do not. With --verdicts each verdict is
kept in a file. Ctrl-C keeps what was done: the same command goes on from there, and judges again
what has changed. A row that cannot be read is a verdict of its own, named by file and line. A
source that reads a file or has worlds loads the tasks that work alone with works=FILE.

A task that can be forged does not work: its suite decides, and none of the tests that fail before
has a canary or a value that only the right answer tells, or they read data or assert by functions
that the work may change (docs/redteam.md). --norefuse_forgeable keeps such tasks and names them.
Training leaves them out as well, unless train.forgeable is set. The table says which share of the
tests that must fail before the work is guarded, and --verdicts says it of each task.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from launch import command, task_flags
from launch.task_flags import FIRST, LAYERS, SECONDS, SETTINGS, limits_of_tests
from launch.workdir import WORKDIR
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool, SandboxUnavailable
from rl_code.host.stop import INTERRUPTED
from rl_code.metrics.progress import Progress
from rl_code.run.config import RunConfig
from rl_code.tasks import validate
from rl_code.tasks.api import SOURCES, find_source
from rl_code.tasks.source import Refusal, Source, SourceOfWorlds
from rl_code.tasks.validate import Verdict
from rl_code.types import Task

JUDGINGS = flags.DEFINE_integer(
    "judgings", 3, "How often the tests of each task run.", lower_bound=1
)
WORKERS = flags.DEFINE_integer("workers", 2, "Tasks that are judged at a time.", lower_bound=1)
MEMORY = flags.DEFINE_integer("sandbox_mb", 512, "MiB of memory of a sandbox.", lower_bound=64)
ROOM = flags.DEFINE_integer("workspace_mb", 64, "MiB that a workspace may hold.", lower_bound=1)
REFUSE = flags.DEFINE_bool(
    "refuse_forgeable", True, "Tasks whose results can be forged without a guess do not work."
)
VERDICTS = flags.DEFINE_string("verdicts", None, "A JSON file that keeps the verdicts.")
# Seconds between two writes of the file of verdicts.
_SAVE_EVERY_S = 5.0


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse(
            f"expected one source of tasks or one config file, found {' '.join(argv[1:])!r}; "
            "--help shows them"
        )
    try:
        named = read_sources(argv[1])
        sources = {name: find_source(one, name) for name, one in named.items()}
        path = Path(VERDICTS.value) if VERDICTS.value else None
        known = validate.load(path) if path else {}
        with SandboxPool(sandboxes()) as pool:
            verdicts, finished = run(sources, pool, known, path, argv[1])
    except SandboxUnavailable as error:
        sys.exit(str(error))
    except ValueError as error:  # of settings, a config, a file of tasks or one of verdicts
        command.refuse(str(error))
    except OSError as error:
        command.refuse(f"--verdicts={VERDICTS.value} or --layers={LAYERS.value}: {error}")
    if path:
        validate.save(path, argv[1], verdicts, finished=finished)
    title = argv[1] if finished else f"{argv[1]}, stopped before its end"
    command.console().print(validate.table(title, verdicts))
    if not finished:
        sys.exit(INTERRUPTED)


def sandboxes() -> SandboxConfig:
    """Sandboxes with room for the tests of repositories."""
    seconds = max(1, round(SECONDS.value))
    return SandboxConfig(
        workers=WORKERS.value,
        layers=LAYERS.value,
        cpu_s=seconds,
        memory_mb=MEMORY.value,
        workspace_mb=ROOM.value,
        processes=64,
    )


def read_sources(word: str) -> dict[str, Named]:
    """The sources that a word names: by name that of the word and --settings, or those of a config.
    Raises ConfigError.
    """
    path, _, argument = command.config_file(word).partition(":")
    if not path.endswith(".py"):
        if word not in SOURCES and Path(word).exists():
            settings = f"""--settings='{{"path": "{word}", "columns": {{...}}}}'"""
            raise ConfigError(
                f"{word} does not say how its tasks are read: name a config that has them as tasks "
                "(configs/own_model.py is a template), or a source and its settings, as in "
                f"python -m launch.validate records {settings}"
            )
        return {"tasks": Named(word, task_flags.settings())}
    if SETTINGS.present:
        raise ConfigError(
            f"--settings={SETTINGS.value!r} is for a source that is named; {path} has settings of "
            "its own"
        )
    config = read_config.build(RunConfig, command.config_of_file(Path(path), argument))
    suites = {f"suite {suite.name}": suite.tasks for suite in config.suites}
    return {"tasks": config.tasks, **suites}


def run(
    sources: dict[str, Source],
    pool: SandboxPool,
    known: dict[str, Verdict],
    path: Path | None,
    title: str,
) -> tuple[list[Verdict], bool]:
    """All verdicts, and whether there is one on every task. They are saved now and then, and
    before an error leaves.
    """
    verdicts: list[Verdict] = []
    count, tasks = tasks_of(sources, pool)
    saved = time.monotonic()
    with Progress(f"validate {title}", count, compiles=False) as progress:

        def note(verdict: Verdict) -> None:
            nonlocal saved
            verdicts.append(validate.refusing(verdict, forgeable=REFUSE.value))
            works = sum(not one.reason for one in verdicts)
            progress.update(len(verdicts), work=f"{works} of {len(verdicts)}")
            if path and time.monotonic() - saved > _SAVE_EVERY_S:
                validate.save(path, title, verdicts, finished=False)
                saved = time.monotonic()

        try:
            validate.judge_all(
                tasks,
                pool,
                limits_of_tests(),
                JUDGINGS.value,
                WORKERS.value,
                known,
                note,
            )
        except KeyboardInterrupt:
            return verdicts, False
        except BaseException:
            if path and verdicts:
                validate.save(path, title, verdicts, finished=False)
            raise
    return verdicts, True


def tasks_of(
    sources: dict[str, Source], pool: SandboxPool
) -> tuple[int, Iterator[tuple[str, Task | Refusal]]]:
    """The tasks of the sources, of each the first --first ones, and how many they are. Worlds are
    built as the tasks are asked for. Raises ConfigError.
    """
    workdir = Path(WORKDIR.value or LAYERS.value or ".")
    most = FIRST.value
    count = 0
    parts = []
    for name, source in sources.items():
        if source.endless and not most:
            raise ConfigError(f"the tasks of {name} have no end: say how many by --first")
        part = itertools.islice(source.load_each(pool, workdir), most or None)
        if not isinstance(source, SourceOfWorlds):
            part = list(part)
        size = source.count() if isinstance(source, SourceOfWorlds) else len(part)
        count += min(size, most or size)
        parts.append(part)
    return count, itertools.chain.from_iterable(parts)


if __name__ == "__main__":
    command.run(main, arguments=True)
