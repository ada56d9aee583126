"""Output of ``launch.evaluate`` for results, and results of before that it compares with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from launch import flags
from rl_code.config.read_config import ConfigError
from rl_code.evaluation import compare
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.contamination import Overlap, without
from rl_code.evaluation.suite import SuiteResult
from rl_code.evaluation.suites import SuiteConfig
from rl_code.types import Task

# What the name of a saved result ends with.
SAVED = ".json"


def tell(
    suite: SuiteConfig,
    results: Sequence[SuiteResult],
    sources: Sequence[str],
    found: Sequence[Overlap] | None,
) -> None:
    """Prints results: what was solved, what it cost, the curve of pass@k, the tasks that are among
    the training tasks, and a comparison where there are two.

    results: one, or that of before and that of now. sources: where each of two is from, since both
    may have the same label. found: None where nobody has looked.
    """
    console = flags.console()
    ks = sorted({k for k in (1, suite.samples) if k <= min(one.largest_k for one in results)})
    if len(results) > 1:
        results = [
            dataclasses.replace(result, label=f"{source}, {result.label}")
            for source, result in zip(sources, results, strict=True)
        ]
    console.print(suite_lib.tables(results, ks))
    if suite.samples > 2:
        console.print(suite_lib.curve(results))
    if found is not None:
        _tell_contamination(found, results[-1])
    if len(results) > 1:
        before, after = results
        console.print(f"before: {before.label}; after: {after.label}", soft_wrap=True)
        console.print(compare.table([compare.compare(before, after, k) for k in ks]))


def _tell_contamination(found: Sequence[Overlap], result: SuiteResult) -> None:
    """Prints tasks that are among the training tasks, and pass@1 without them."""
    console = flags.console()
    console.print(f"{len(found)} of {len(result.tasks)} tasks are among the training tasks")
    for overlap in found:
        console.print(
            f"  {overlap.task}: {overlap.other}, {overlap.why}", soft_wrap=True, highlight=False
        )
    left = without(result, found)
    if found and left is not None and left.largest_k:
        rate = suite_lib.percent(left.interval(1))
        console.print(f"pass@1 on the other {len(left.tasks)}: {rate}", highlight=False)


def saved_result(path: str, suite: SuiteConfig) -> SuiteResult:
    """The result of before that --against names: a file, or a workdir that has one of the suite; of
    several the newest. Raises ConfigError.
    """
    if path.endswith(SAVED):
        try:
            return suite_lib.load(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--against={path}: {error}") from error
    try:
        results = [one for one in suite_lib.load_all(path) if one.suite == suite.name]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against={path}: {error}") from error
    newest = max((one.step for one in results), default=0)
    labels = [one.label for one in results if one.step == newest]
    if len(labels) != 1:
        folder = Path(path) / suite_lib.FOLDER
        there = f"has several: {', '.join(labels)}" if labels else "has none"
        raise ConfigError(
            f"--against={path}: name a saved result of the suite {suite.name}; {folder} {there}"
        )
    (found,) = (one for one in results if one.step == newest)
    return found


def refuse_other_tasks(before: SuiteResult, tasks: Sequence[Task], suite: SuiteConfig) -> None:
    """Raises ConfigError for a result on other tasks than those that are to be played: better than
    when they have been played.
    """
    differ = sorted({task.id for task in tasks} ^ set(before.ids))
    if differ:
        more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise ConfigError(
            f"--against: {before.suite}.{before.label} is not on the tasks that the suite "
            f"{suite.name} has now; only one of them has {', '.join(differ[:5])}{more}"
        )
