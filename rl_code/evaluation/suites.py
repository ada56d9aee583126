"""What a suite is: held-out tasks and how they are played; ready ones by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_code import named, read_config
from rl_code.named import Named
from rl_code.read_config import ConfigError, at_least
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
        """Whether a task of the source belongs to the suite; a subclass may choose."""
        return True

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
            return read_config.build(cls, section, path)
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
}
