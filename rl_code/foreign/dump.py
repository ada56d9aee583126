"""The content of a dump, as a format reads it: steps of groups of episodes, made of spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from rl_code.config.read_config import ConfigError
from rl_code.types import ToolCall, ToolResult

# The key of a task's meta by which it says that nobody recorded who solved it, and its value.
SOLVED, NOT_RECORDED = "solved", "not recorded"


class DumpError(ConfigError):
    """A dump that cannot be read; the message names the file, the line and the value."""


@dataclasses.dataclass(frozen=True)
class Span:
    """One message of an episode."""

    role: Literal["prompt", "assistant", "tool"]
    # Text of the message; what is shown where the dump has no ids.
    text: str
    # int32 [T], the tokens as the dump has them; None where it has only text.
    ids: np.ndarray | None = None
    # bool [T], where the policy chose the token.
    sampled: np.ndarray | None = None
    # float32 [T], the sampler's log-probabilities: 0 where not sampled, NaN where not on record.
    logprobs: np.ndarray | None = None
    # float32 [T], the trainer's log-probabilities of sampled tokens, likewise; None for none.
    trainer_logprobs: np.ndarray | None = None
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()


@dataclasses.dataclass(frozen=True)
class Branch:
    """Spans that follow what is kept of another branch."""

    spans: tuple[Span, ...]
    # Index of an earlier branch; -1 for one that begins by itself.
    parent: int = -1
    # Number of spans of the whole parent that stand before these.
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode of a dump."""

    branches: tuple[Branch, ...]
    reward: float
    # Rewards by name.
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Things that a reader should know of it.
    flags: tuple[str, ...] = ()
    # The dump's own word for how it ended.
    status: str = NOT_RECORDED
    # Numbers by name that are no part of the reward.
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # What else the dump says: shown, and not compared.
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Version of the weights that sampled it; None where the dump does not say one.
    version: int | None = None
    # File and line, for messages.
    place: str = ""

    @property
    def has_ids(self) -> bool:
        """True if sampled tokens are on record."""
        return any(span.ids is not None for branch in self.branches for span in branch.spans)


@dataclasses.dataclass(frozen=True)
class DumpedGroup:
    """Episodes that answer one task."""

    task_id: str
    # Chat messages of the task, or one message of a prompt that is text.
    messages: tuple[Mapping[str, Any], ...]
    # What the dump says about the task; equal in two runs on it.
    meta: Mapping[str, Any]
    episodes: tuple[Episode, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """The steps of a dump."""

    # Step -> where its groups are, for ``Format.read``.
    places: Mapping[int, Any]
    # What was passed over, in words; "" for nothing.
    left_out: str = ""


class Format(Protocol):
    """A kind of dump: a frozen dataclass whose fields are its settings."""

    # What its files lack, in words, for whoever reads the record.
    lacks: ClassVar[str]

    def find(self, paths: Sequence[Path]) -> Found:
        """The steps. Raises DumpError."""
        ...

    def read(self, step: int, place: Any) -> Sequence[DumpedGroup]:
        """The groups of a step. Raises DumpError."""
        ...
