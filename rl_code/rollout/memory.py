"""Rules of memory: which notes an episode leaves for later ones on the same repository.

A rule goes through the record, group by group, and makes the notes after a group of those before
it. So notes are a function of the record, like all that is planned (``note_book``).

none: no notes.
all: everything that calls stored. No call forgets, and nothing is too old.
calls: what calls stored and did not forget, within the bounds of the tools.
recency: as calls, of which the newest stay.
use_count: as calls, of which those stay that ``memory_recall`` showed most often; of equals the
  newest.
error_driven: what failed in an episode, and the edit behind which the same call succeeded. Calls
  store nothing.
summary: what the agent says when an episode is over and it is asked what to keep
  (``environment.summaries.Closing``). Calls store nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, at_least
from rl_code.environment.notes import LEFT_OUT
from rl_code.environment.summaries import Closing, closing_of
from rl_code.environment.tools.memory import NAME_LENGTH, recalled
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.text.messages import said
from rl_code.types import Group, Task, ToolCall, ToolResult, Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class Note:
    """A text that was kept, under its name."""

    text: str
    # Number of results that showed it.
    uses: int = 0
    # Where it was stored: step, number of the group, index of the episode; None for nowhere.
    stored: tuple[int, int, int] | None = None
    # Number of groups in which some episodes did not read it (``late_credit``).
    tried: int = 0


# Stands between what failed and its mend.
_MENDED = " | mended by "

# The notes of a scope by name, the oldest first.
type Notes = dict[str, Note]
type Tools = Mapping[str, Tool]


class Rule:
    """A rule of memory. A frozen dataclass whose fields are the settings of a config."""

    # True if notes are what calls stored: nothing is kept where the agent has no such tool.
    by_calls: ClassVar[bool] = True
    # True if a message of the agent makes each note (``made_by``).
    by_messages: ClassVar[bool] = True

    @property
    def closing(self) -> Closing | None:
        """The request with which episodes end; None for none."""
        return None

    def keeps(self, tools: Tools) -> bool:
        """True if episodes with these tools may leave notes, so that the record is gone through."""
        return not self.by_calls or any(tool.notes for tool in tools.values())

    def after(
        self, group: Group, tools: Tools, before: Notes, place: tuple[int, int] = (0, 0)
    ) -> Notes:
        """The notes after a group, whose trajectories change them in order. place: step and number
        of the group.
        """
        notes = dict(before)
        left_out, *_ = group.task.meta.get(LEFT_OUT, ("",))
        if left_out in notes:
            notes[left_out] = dataclasses.replace(notes[left_out], tried=notes[left_out].tried + 1)
        for trajectory in group.trajectories:
            known = dict(notes)
            self.change(notes, group.task, trajectory, tools)
            for name, note in notes.items():
                if name not in known or known[name].text != note.text:
                    notes[name] = Note(note.text, note.uses, (*place, trajectory.index))
        return notes

    def made_by(self, trajectory: Trajectory, name: str) -> Turn | None:
        """The message with which a trajectory made a note; None for one that no message made."""
        return None

    def change(self, notes: Notes, task: Task, trajectory: Trajectory, tools: Tools) -> None:
        """Changes the notes as a trajectory asks."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Nothing(Rule):
    """No notes."""

    by_messages: ClassVar[bool] = False

    def keeps(self, tools: Tools) -> bool:
        return False

    def change(self, notes: Notes, task: Task, trajectory: Trajectory, tools: Tools) -> None:
        notes.clear()


@dataclasses.dataclass(frozen=True)
class Everything(Rule):
    """Everything that calls stored, whatever the bounds of the tools."""

    def change(self, notes: Notes, task: Task, trajectory: Trajectory, tools: Tools) -> None:
        for call, _ in _carried_out(trajectory):
            one: dict[str, str] = {}
            if call.name in tools and tools[call.name].notes:
                tools[call.name].note(call.arguments, one)
            for name, text in one.items():
                before = notes.pop(name, Note(text))  # what is stored again is the newest
                notes[name] = dataclasses.replace(before, text=text)

    def made_by(self, trajectory: Trajectory, name: str) -> Turn | None:
        return _stored_by(trajectory, name)


@dataclasses.dataclass(frozen=True)
class Calls(Rule):
    """Notes that calls stored and did not forget."""

    def change(self, notes: Notes, task: Task, trajectory: Trajectory, tools: Tools) -> None:
        for call, result in _carried_out(trajectory):
            if call.name == "memory_recall":
                for name in recalled(result.content, notes):
                    notes[name] = dataclasses.replace(notes[name], uses=notes[name].uses + 1)
            if call.name in tools and tools[call.name].notes:
                texts = {name: note.text for name, note in notes.items()}
                tools[call.name].note(call.arguments, texts)
                before = dict(notes)
                notes.clear()
                for name, text in texts.items():
                    known = before.get(name, Note(text))
                    notes[name] = dataclasses.replace(known, text=text)
                self.drop(notes)

    def made_by(self, trajectory: Trajectory, name: str) -> Turn | None:
        return _stored_by(trajectory, name)

    def drop(self, notes: Notes) -> None:
        """Drops notes beyond those that are kept."""


@dataclasses.dataclass(frozen=True)
class Recency(Calls):
    """The newest of the notes that calls stored."""

    # Notes that are kept.
    most: int = 8

    def __post_init__(self) -> None:
        at_least(self, most=1)

    def drop(self, notes: Notes) -> None:
        while len(notes) > self.most:
            del notes[next(iter(notes))]


@dataclasses.dataclass(frozen=True)
class UseCount(Recency):
    """The notes that calls stored and that were shown most often."""

    def drop(self, notes: Notes) -> None:
        while len(notes) > self.most:
            # the first of several equals, which is the oldest, but never the one stored just now
            *older, _ = notes
            del notes[min(older, key=lambda name: notes[name].uses)]


@dataclasses.dataclass(frozen=True)
class ErrorDriven(Recency):
    """Failures of episodes with their mends, the newest ones."""

    # The most characters of a note.
    longest: int = 400

    by_calls: ClassVar[bool] = False
    by_messages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least(self, most=1, longest=40)

    def made_by(self, trajectory: Trajectory, name: str) -> Turn | None:
        return None

    def change(self, notes: Notes, task: Task, trajectory: Trajectory, tools: Tools) -> None:
        for failed, mend in _mends(trajectory, tools):
            name = _name(task.entry_point or task.path or failed.name)
            half = (self.longest - len(_MENDED)) // 2
            what = one_line(failed.content, half)
            by = one_line(_written(mend), half) if mend else "nothing"
            notes.pop(name, None)
            notes[name] = Note(f"{what}{_MENDED}{by}")
            self.drop(notes)


@dataclasses.dataclass(frozen=True)
class Summary(Recency):
    """Messages that the agent says at the end of an episode, the newest ones."""

    # The most sampled tokens of what it says, and characters of a note.
    tokens: int = 128
    longest: int = 400
    # Text of the request.
    request: str = (
        "The work is over. Write in a few lines what is worth to remember for later work on this "
        "repository, and nothing else."
    )

    by_calls: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least(self, most=1, tokens=1, longest=1)

    @property
    def closing(self) -> Closing:
        return Closing(self.tokens, self.request)

    def change(self, notes: Notes, task: Task, trajectory: Trajectory, tools: Tools) -> None:
        message = closing_of(trajectory)
        text = said(message.text) if message else ""
        if text:
            name = _name(task.entry_point or task.path or task.id)
            notes.pop(name, None)
            notes[name] = Note(text[: self.longest])
            self.drop(notes)

    def made_by(self, trajectory: Trajectory, name: str) -> Turn | None:
        return closing_of(trajectory)


RULES: dict[str, Callable[..., Rule]] = {
    "none": Nothing,
    "all": Everything,
    "calls": Calls,
    "recency": Recency,
    "use_count": UseCount,
    "error_driven": ErrorDriven,
    "summary": Summary,
}


def find_rule(config: Named, path: str) -> Rule:
    """The rule that a config names, with its settings. path: dotted key of the config.

    Raises ConfigError for no such rule, or settings that it does not take.
    """
    rule: Any = named.make(RULES, config, path)
    if not isinstance(rule, Rule):
        kind = "rl_code.rollout.memory.Rule"
        raise ConfigError(f"{path} = {config.name!r}: {rule!r} is no {kind}")
    return rule


def _mends(trajectory: Trajectory, tools: Tools) -> Iterator[tuple[ToolResult, ToolCall | None]]:
    """Each kind of call that failed: its first result that failed, and the last edit before one
    that did not; None where none came.
    """
    failed: dict[str, ToolResult] = {}
    edit: ToolCall | None = None
    for _, call, result in _answered(trajectory):
        tool = tools.get(call.name)
        if tool is None:
            continue
        if tool.edits:
            edit = call if result.ok else edit
        elif tool.failed(result.content, ok=result.ok):
            failed.setdefault(call.name, result)
        elif call.name in failed:
            yield failed.pop(call.name), edit
    for result in failed.values():
        yield result, None


def _stored_by(trajectory: Trajectory, name: str) -> Turn | None:
    """The last message whose call stored a note of this name."""
    found = None
    for message, call, result in _answered(trajectory):
        if result.ok and call.name == "memory_store" and call.arguments.get("name") == name:
            found = message
    return found


def _written(call: ToolCall) -> str:
    """An edit in words."""
    return " ".join(str(value) for value in call.arguments.values())


def _name(text: str) -> str:
    """The name of a note: one word."""
    return "_".join(text.split())[:NAME_LENGTH] or "note"


def _answered(trajectory: Trajectory) -> Iterator[tuple[Turn, ToolCall, ToolResult]]:
    """The well-formed calls of an episode, with the messages that made them and their results, in
    order.
    """
    for message, told in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        if message.role == "assistant" and told.role == "tool":
            for call, result in zip(message.calls, told.results, strict=False):
                if not call.error:
                    yield message, call, result


def _carried_out(trajectory: Trajectory) -> Iterator[tuple[ToolCall, ToolResult]]:
    """The calls of an episode that did what they were asked to, with their results, in order."""
    return ((call, result) for _, call, result in _answered(trajectory) if result.ok)


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """Rule of the notes that episodes leave for later ones on the same repository."""

    # The rule of what is kept: a key of rollout.memory.RULES, with its settings.
    rule: Named = Named("calls")
    # Episodes of a group that read the notes without one of them. What the others earn more is the
    # worth of this note, with which the message that stored it is credited (``late_credit``). 0 to
    # credit no stores.
    left_out: int = 0
    # The most steps between a store and its credit; notes that are older are left out no more.
    oldest: int = 16

    def __post_init__(self) -> None:
        rule = find_rule(self.rule, "config.memory.rule")
        if self.left_out < 0 or self.oldest < 1:
            raise ValueError(f"{self.left_out=} must be at least 0 and {self.oldest=} at least 1")
        if self.left_out and not rule.by_messages:
            raise ConfigError(
                f"config.memory.left_out = {self.left_out}: by the rule {self.rule.name!r} no "
                "message makes notes that could be credited; set it to 0, or take another rule"
            )

    def found(self) -> Rule:
        """The rule with its settings."""
        return find_rule(self.rule, "config.memory.rule")
