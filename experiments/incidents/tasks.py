"""Functions to write from a few words, some of which do not say enough.

What is wanted is a program of ``generated``, with its splits. Its description is all that the agent
reads: no code, no examples. A clear task states every constant. An unclear one leaves one constant
open ("add k"), or names two of which one is meant ("add 2 or 4"). So no policy, however
good, can do better than guess there. A person who is asked says what is meant
(``rl_code.environment.tools.ask``).

Each task also has its demonstration, for the warm start. Reinforcement learning can only pay what
the policy sometimes does, and a model from scratch has never seen a broken call or a question; so a
share of the demonstrations has one.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from people.feedback.rewards.follow_up_data import DISSATISFIED, messages, training_families
from rl_code.config.named import Named
from rl_code.config.read_config import shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.ask import ANSWER
from rl_code.tasks import generated
from rl_code.tasks.demonstrations import PLAYED
from rl_code.tasks.operations import OPERATIONS
from rl_code.tasks.programs import Program, source, wrong_version
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream
from rl_code.types import Group, Task, Tests, ToolCall, ToolResult, Trajectory

_PROTOCOL = Compact()
_TOOLS = find_tools([Named("write_file"), Named("submit"), Named("ask")])
_SUBMIT = ToolCall("submit", {})
_ASK = ToolCall("ask", {})
# A call without its argument.
_BROKEN = "<|call|>write<|end|><|eot|>"
# Draws of a program with a constant, for each task.
_DRAWS = 1 << 10


@dataclasses.dataclass(frozen=True)
class FromWords(Source):
    """An endless stream of functions to write from their description."""

    # "train", "validation" or "test".
    split: str
    # Levels of ``generated``, each drawn with equal probability.
    levels: tuple[int, ...]
    # What an unclear task says of one constant: "open" nothing, "two" that it is one of two.
    unclear: Literal["open", "two"]
    # Share of the tasks that are unclear.
    share: float = 0.5
    # Another seed gives another stream of tasks.
    seed: int = 0
    # Of the demonstrations: the share whose first edit is right, whose only call is broken, which
    # ask first (on clear tasks, and on unclear ones), and of those that ask, which then ask again
    # and never edit; and the share that begins after a wrong edit and a complaint about it, in
    # families of words that the classifier of rewards learns from. What was wrong is not learned.
    right: float = 0.65
    broken: float = 0.0
    asks_clear: float = 0.0
    asks_unclear: float = 0.0
    again: float = 0.0
    complaints: float = 0.0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("played",)

    def __post_init__(self) -> None:
        if self.unclear not in ("open", "two"):
            raise ValueError(f"unclear={self.unclear!r} must be 'open' or 'two'")
        shares(self, "share", "right", "broken", "asks_clear", "asks_unclear", "again")
        shares(self, "complaints")
        generated.generate(self.split, self.seed, 0, self.levels)  # names what is wrong

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(self.task)

    def task(self, index: int) -> Task:
        """Task ``index``; the same for the same settings."""
        base = self._with_constant(index)
        program = base.meta["program"]
        rng = random.Random(f"from words/{base.id}")
        at = rng.choice([i for i, step in enumerate(program) if step[1] is not None])
        is_clear = rng.random() >= self.share
        meant = words(program[at], str(program[at][1]))
        said = meant if is_clear else words(program[at], self._left_open(program[at], rng))
        every = [words(step, str(step[1])) for step in program]
        every[at] = said
        meta = {
            "source": "from_words",
            "split": self.split,
            "level": base.meta["level"],
            "program": program,
            "clear": is_clear,
            ANSWER: meant,
        }
        task = Task(
            id=f"from_words/{base.id}",
            messages=({"role": "user", "content": ", ".join(every)},),
            files={base.path: "def f(xs):\n    pass\n"},
            path=base.path,
            entry_point=base.entry_point,
            visible_tests=Tests(),
            hidden_tests=Tests(cases=base.visible_tests.cases + base.hidden_tests.cases),
            reference={base.path: source(program, "ints")},
            meta=meta,
        )
        return dataclasses.replace(task, meta={**meta, PLAYED: self._played(task, rng)})

    def _with_constant(self, index: int) -> Task:
        """The first of the programs drawn for a task that takes a list of numbers and has a
        constant.
        """
        for draw in range(_DRAWS):
            base = generated.generate(self.split, self.seed, index * _DRAWS + draw, self.levels)
            program = base.meta["program"]
            takes = OPERATIONS[program[0][0]].takes
            if takes == "ints" and any(constant is not None for _, constant in program):
                return base
        raise ValueError(f"levels={self.levels} hardly ever have constants of lists of numbers")

    def _left_open(self, step: tuple[str, int], rng: random.Random) -> str:
        """Words of an unclear task in place of a step's constant."""
        if self.unclear == "open":
            return "k"
        name, constant = step
        other = rng.choice([one for one in OPERATIONS[name].constants if one != constant])
        return " or ".join(map(str, sorted((constant, other))))

    def _played(self, task: Task, rng: random.Random) -> tuple[tuple[str, bool], ...]:
        """The demonstration behind the prompt: (text, whether the agent writes it)."""
        if rng.random() < self.broken:
            return ((_BROKEN, True),)
        program = task.meta["program"]
        if self.complaints and rng.random() < self.complaints:
            return self._complained(task, rng)
        asked: tuple[tuple[str, bool], ...] = ()
        asks = self.asks_clear if task.meta["clear"] else self.asks_unclear
        if rng.random() < asks:
            answer = _PROTOCOL.observation([ToolResult("ask", task.meta[ANSWER])])
            asked = ((_message(_ASK), True), (answer, False))
            if rng.random() < self.again:
                return (*asked, (_message(_ASK), True))
        attempt = program if rng.random() < self.right else wrong_version(program, rng)
        return (*asked, (_written(task, attempt), True))

    def _complained(self, task: Task, rng: random.Random) -> tuple[tuple[str, bool], ...]:
        """A wrong edit and what the person says of it, who says again what is wanted; then mostly
        a right one.
        """
        program = task.meta["program"]
        results = [ToolResult("write_file", "ok"), ToolResult("submit", "submitted")]
        families = [one for one in training_families() if one in DISSATISFIED]
        said = messages((rng.choice(families),), 1, rng.randrange(2**31))[0].text
        meant = "" if task.meta["clear"] else f"\n{task.meta[ANSWER]}"
        again = f"{said}\n{task.messages[-1]['content']}{meant}<|eot|>"
        attempt = program if rng.random() < self.right else wrong_version(program, rng)
        return (
            (_written(task, wrong_version(program, rng)), False),
            (_PROTOCOL.observation(results) + again, False),
            (_written(task, attempt), True),
        )


def _written(task: Task, program: Program) -> str:
    """The message that writes a program and hands it in."""
    content = {"path": task.path, "content": source(program, "ints")}
    return _message(ToolCall("write_file", content), _SUBMIT)


def words(step: tuple[str, int | None], constant: str) -> str:
    """A step in a few words, with a text in place of its constant."""
    return " ".join(constant if word == "k" else word for word in OPERATIONS[step[0]].words.split())


def _message(*calls: ToolCall) -> str:
    return _PROTOCOL.message(calls, _TOOLS)


def by_clarity(groups: Sequence[Group]) -> Iterator[tuple[str, list[Trajectory]]]:
    """The trajectories of tasks that say all that is wanted, as "clear", and those of the others,
    as "unclear"; without a kind that has none.
    """
    for name, is_clear in (("clear", True), ("unclear", False)):
        found = [
            trajectory
            for group in groups
            if group.task.meta["clear"] == is_clear
            for trajectory in group.trajectories
        ]
        if found:
            yield name, found
