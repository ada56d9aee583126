"""Suites: held-out tasks and how they are played; ready ones by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rl_code.config import named, read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, at_least
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.types import Limits, Task


@dataclasses.dataclass(frozen=True)
class SuiteConfig:
    """One suite of held-out tasks, and how they are played.

    A config writes a suite out, with its name and its tasks, or names one of SUITES and what to
    change in it. A suite of one's own is an object of this class, or a subclass with settings of
    its own, which a config names as ``package.module:object``.
    """

    # The name under which results are stored.
    name: str
    # The source of the tasks: a key of tasks.api.SOURCES, with its settings.
    tasks: Named
    # How many tasks are played: the first ones whose prompt fits. 0 for all.
    count: int = 0
    # Episodes of each task.
    samples: int = 1
    # How tokens are drawn; None for ``rollout.sampling``.
    sampling: SamplingConfig | None = None
    # Whether the ``count`` tasks with the shortest prompts are played instead of the first.
    shortest: bool = False
    # The protocol of the episodes; None for that of training.
    protocol: Named | None = None
    # The limits of the episodes; None for those of training.
    limits: Limits | None = None
    # Shapes of an engine of the suite's own; None for the engine of training, or for one that
    # follows from the suite's limits and dtype where it sets them.
    engine: EngineConfig | None = None
    # The dtype of the copy of the model that samples, whose matrices are not quantised; None for
    # ``rollout.dtype`` and ``rollout.weights``.
    dtype: str | None = None

    def __post_init__(self) -> None:
        at_least(self, count=0, samples=1)

    def keeps(self, task: Task) -> bool:
        """True if a task of the source belongs to the suite; a subclass may choose."""
        return True

    def choose(
        self, tasks: Iterable[Task], length: Callable[[Task], int], which: str
    ) -> list[Task]:
        """The tasks that are played. Where the first ones will do, no further one is asked for.

        tasks: those that can be played, in order. length: of a prompt, in any unit. which: what the
        tasks do, for the error. Raises ConfigError where they are fewer than ``count``.
        """
        if self.shortest:
            tasks = sorted(tasks, key=length)
        kept = (task for task in tasks if self.keeps(task))
        chosen = list(itertools.islice(kept, self.count or None))
        if self.count > len(chosen):
            raise ConfigError(
                f"suite {self.name}: count={self.count}, but only {len(chosen)} tasks {which}"
            )
        return chosen

    @classmethod
    def from_config(cls, value: Any, path: str) -> SuiteConfig:
        """Reads a suite that is written out, ``dict(name="mine", tasks=..., ...)``, or a named one:
        ``"humaneval"``, or ``dict(name="my_lab.suites:Hard", label="hard_5", count=5)``.

        Raises:
          ConfigError: no such suite, or wrong fields; names the dotted key.
        """
        section = value.to_dict() if hasattr(value, "to_dict") else value
        written_out = isinstance(section, Mapping) and "tasks" in section
        if written_out and ":" not in str(section.get("name")):
            kind = OfPath if "path" in section else cls
            return read_config.build(kind, section, path)
        reference = Named.from_config(section, path)
        settings = dict(reference.settings)
        if "label" in settings:
            settings["name"] = settings.pop("label")
        suite = named.find(SUITES, reference.name, path)
        if isinstance(suite, type) and issubclass(suite, SuiteConfig):
            return read_config.build(suite, settings, path)
        if not isinstance(suite, SuiteConfig):
            raise ConfigError(f"{path} = {reference.name!r}: {suite!r} is no {cls.__name__}")
        return read_config.build(type(suite), read_config.to_dict(suite) | settings, path)


@dataclasses.dataclass(frozen=True)
class OfPath(SuiteConfig):
    """A suite whose tasks are read from a file or a folder, which a config names:
    ``dict(name="leetcode", path="leetcode.jsonl")``.
    """

    # The file or folder of the source.
    path: str = ""
    # Further settings of the source, such as ``places``.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path:
            settings = {**self.tasks.settings, **self.settings, "path": self.path}
            # the class is frozen
            object.__setattr__(self, "tasks", Named(self.tasks.name, settings))


_GREEDY = SamplingConfig(temperature=0.0)
# Expected values of EvalPlus are computed once, by the reference.
_PLUS = {"form": "chat", "differential": {"cases": 0, "timeout_s": 10.0, "workers": 2}}


def _in_chat(name: str, source: str, settings: Mapping[str, Any]) -> OfPath:
    """Functions to write in a chat, greedy, for instructed models."""
    return OfPath(name, Named(source, settings), sampling=_GREEDY, protocol=Named("completion"))


def _for_agents(name: str) -> OfPath:
    """Tasks for agents with tools, sampled and played as in training."""
    return OfPath(name, Named(name))


SUITES: dict[str, SuiteConfig] = {
    # Every task of HumanEval as the beginning of a file, greedy: for base models.
    "humaneval": SuiteConfig(
        name="humaneval",
        tasks=Named("humaneval", {"form": "raw"}),
        sampling=SamplingConfig(temperature=0.0),
        protocol=Named("raw_completion"),
    ),
    # Every task of HumanEval in a chat, greedy, for instructed models.
    "humaneval_chat": SuiteConfig(
        name="humaneval_chat",
        tasks=Named("humaneval", {"form": "chat"}),
        sampling=SamplingConfig(temperature=0.0),
        protocol=Named("completion"),
    ),
    # These are read from a path.
    "humaneval_plus": _in_chat("humaneval_plus", "evalplus", _PLUS),
    "mbpp": _in_chat("mbpp", "mbpp", {"split": "test", "form": "chat"}),
    "mbpp_plus": _in_chat("mbpp_plus", "evalplus", _PLUS),
    "humanevalfix": _for_agents("humanevalfix"),
    "quixbugs": _for_agents("quixbugs"),
    "leetcode": _for_agents("leetcode"),
    "swe": _for_agents("swe"),
    "harbor": _for_agents("harbor"),
    "exercism": _for_agents("exercism"),
}
