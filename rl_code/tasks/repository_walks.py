"""Imperfect demonstrations of repository tasks, as moves: search, read along the imports, think,
try lines, submit. In which words a move is said, and what is answered to it, is not said here:
``walks_in_tools`` writes calls of tools, ``walks_in_shell`` shell commands.

Of each line of a function that was read a thought says in words what it should do by the message,
what it does, and whether that is the same. A model that learns this from nothing is told by it
which lines belong to which words. Where a line is wrong it is changed and tried (``Try``), or
changed and submitted untested; else the function that is called is read.

Where a repository has a past, and there is a tool that shows which lines it changed, thoughts are
of these alone.

Where a name may be wrong in a call, and there is a tool for it, a walk begins with a check of all
files, and goes to what that finds.

Some walks go wrong first: a thought sees a fault where there is none, takes the fault for something
else, or overlooks it. Then the walk begins again from the symptom, as if nothing had been thought
before. What is wrong stands there and is not learned: a model makes mistakes enough of its own, and
from thoughts that are wrong it would learn more slowly what is right. What it learns is to begin
again, and not to believe what it thought before.

Some walks write tests of their own before they hand in (``with_tests``), good ones and bad ones.

Some walks guess: without a thought a line of the file that was just read is changed into something
that is easily taken for it, and submitted. That is learned, since it is a bad habit and not a wrong
belief: what the model knows does not suffer from it, and reinforcement learning can tell it from
the careful habit by what each earns.

All that files and tests say follows from the files and the operations; nothing is executed in a
sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from rl_code.tasks.operations import Failure
from rl_code.tasks.programs import Program, Step, body, describe_inward, evaluate, words_of
from rl_code.tasks.repositories import alternatives
from rl_code.tasks.repository_past import changed_in
from rl_code.text.lines import split_lines
from rl_code.types import Case, Limits, Task

# Of ``task.meta["source"]``.
SOURCE = "repositories"


class Search(NamedTuple):
    """Looks for a text in all files."""

    text: str


class Check(NamedTuple):
    """Looks for names that are nowhere defined."""


class Read(NamedTuple):
    """Reads a function, with the file that it is in."""

    path: str
    name: str


class Change(NamedTuple):
    """Puts another line in the place of one, which stays there."""

    path: str
    # Counted from 1.
    number: int
    line: str


class Failed(NamedTuple):
    """A visible test that failed."""

    case: Case
    # The result of the call, or a Failure with the error that it raised.
    value: Any


class Try(NamedTuple):
    """Changes a line and runs the visible tests; the change is taken back if one fails."""

    change: Change
    failures: tuple[Failed, ...]
    # Runs of tests that are left behind it.
    runs_left: int


class WriteTests(NamedTuple):
    """Writes the file of one's own tests."""

    text: str


class Submit(NamedTuple):
    """Hands the files in."""


Move = Check | Search | Read | Change | Try | WriteTests | Submit


class Message(NamedTuple):
    """Message of the agent: a thought, and the moves after it."""

    moves: tuple[Move, ...]
    # Lines; "" for no thought.
    thought: str = ""
    # True if it is right, and so may be learned.
    right: bool = True


class Mistake(NamedTuple):
    """Line that a walk which goes wrong misreads."""

    # The function of the chain.
    link: int
    # Index of the step in ``program``.
    at: int
    # The mistaken view of what the line should do; None if the walk overlooks the fault.
    step: Step | None


def walk(
    task: Task,
    rng: random.Random,
    limits: Limits,
    p_right: float,
    p_test: float,
    p_give_up: float,
    p_guess: float,
    checks: bool = False,
    blames: bool = False,
    heeds: bool = True,
) -> Iterator[Message]:
    """The messages of one episode.

    checks: whether there is a tool for ``Check``. blames: whether there is a tool that reads a file
    with who changed which line, where the task has a past. heeds: whether the walk goes where a
    check says that a name is wrong, and does not search for it.

    The probabilities are those of ``DemonstrationConfig``. It keeps to the turns and test runs of
    ``limits``; budgets of tokens are ignored. Without test runs nothing is tried, and so nothing
    goes wrong. Raises ValueError when there are too few turns to come to the cause.
    """
    chain = task.meta["chain"]
    cause = chain.index(task.meta["cause"])
    checks = checks and task.meta["names_may_be_wrong"]
    # a check tells the file
    told = checks and heeds and task.meta["misnamed"] is not None
    least = 3 if told else cause + 3 + checks
    if limits.turns < least:
        raise ValueError(f"{limits.turns=} must be at least {least} for {task.id}")
    turns, runs = limits.turns, limits.test_runs
    suspected = changed_in(task) if blames and task.meta["past"] else None
    if checks:
        yield Message((Check(),))
        turns -= 1
    begins = cause if told else 0
    if not told:
        yield Message((Search(f"def {task.entry_point}"),))
        turns -= 1
    thought = ""
    right = True
    while True:
        mistake = None
        # one that goes wrong leaves turns for one that does not
        may_err = rng.random() >= p_right and turns > len(chain) + cause + 3 and runs > 1
        if may_err and task.meta["misnamed"] is None:
            mistake = _mistake(task, rng)
        overlooked = mistake is not None and mistake.step is None
        last = len(chain) - 1 if overlooked else cause if mistake is None else mistake.link
        for link in range(begins, last + 1):
            yield Message((Read(chain[link], task.meta["functions"][link]),), thought, right)
            turns -= 1
            if rng.random() < p_guess:
                yield Message((_guess(task, link, rng), Submit()))
                return
            thought = _thought(task, link, mistake, suspected)
            right = mistake is None or link != mistake.link
        if overlooked:
            continue
        if task.meta["misnamed"] is not None:
            change, failures = _named_right(task), ()
        else:
            at = task.meta["fault"] if mistake is None else mistake.at
            step = task.meta["program"][at] if mistake is None else mistake.step
            change, failures = _change(task, at, step), _failures(task, at, step)
        if right and (turns < 2 or runs < 1 or rng.random() >= p_test):
            yield Message((change, Submit()), thought)
            return
        turns -= 1
        runs -= 1
        yield Message((Try(change, failures, runs),), thought, right)
        thought, right = "", True
        if not failures or rng.random() < p_give_up:
            yield Message((Submit(),))
            return


def with_tests(
    walk: Iterator[Message], task: Task, rng: random.Random, probability: float
) -> Iterator[Message]:
    """A walk that, with a probability, writes tests of its own before it hands in. They assert one
    visible case, or two, or call the function and assert nothing.
    """
    for message in walk:
        if message.moves[-1] == Submit() and rng.random() < probability:
            cases = task.visible_tests.cases[: rng.randrange(len(task.visible_tests.cases) + 1)]
            tests = WriteTests(own_tests(task, cases))
            message = message._replace(moves=(*message.moves[:-1], tests, Submit()))
        yield message


def own_tests(task: Task, cases: Sequence[Case]) -> str:
    """A file of tests that asserts these cases; where there are none, that runs the first one."""
    name = task.entry_point
    lines = [f"    assert {name}({case.args[0]!r}) == {case.expected!r}\n" for case in cases]
    if not lines:
        lines = [f"    {name}({task.visible_tests.cases[0].args[0]!r})\n"]
    module = task.path.removesuffix(".py")
    return f"from {module} import {name}\n\n\ndef test_own():\n{''.join(lines)}"


def lines_with(task: Task, text: str) -> list[tuple[str, int, str]]:
    """The lines of a task's files in which a text stands: (path, number, line), in the order in
    which a search finds them, of files that are all in one folder.
    """
    return [
        (path, number, line)
        for path, content in sorted(task.files.items())
        for number, line in enumerate(split_lines(content), start=1)
        if text in line
    ]


def _mistake(task: Task, rng: random.Random) -> Mistake:
    """A mistake in one of the functions from the symptom to the cause."""
    cause = task.meta["chain"].index(task.meta["cause"])
    link = rng.randrange(cause + 1)
    at = task.meta["fault"] if link == cause else rng.randrange(*task.meta["spans"][link])
    # what stands there is right, or it is the fault, which has to be taken for something else
    wrong = [s for s in alternatives(task.meta["broken"][at]) if s != task.meta["program"][at]]
    overlooks = link == cause and (not wrong or rng.random() < 0.5)
    return Mistake(link, at, None if overlooks else rng.choice(wrong))


def _thought(
    task: Task, link: int, mistake: Mistake | None, suspected: Set[tuple[str, int]] | None
) -> str:
    """Thought about each line of a function of the chain, the last one first: what it should do,
    its number, what it does, and whether that is the same. suspected: (path, number) of those that
    are thought of; None for all.

    The number stands behind what the message asks for. In front of it, a model takes what the line
    does for what it should do, since most lines are right. The dash is there for the letter behind
    it: it has a space in front, as in the message, and so is the same token.
    """
    asked = list(task.meta["program"])
    stands = list(task.meta["broken"])
    if mistake is not None and mistake.step is not None:
        asked[mistake.at] = mistake.step
    elif mistake is not None:
        stands[mistake.at] = asked[mistake.at]
    should = describe_inward(tuple(asked))
    thought = []
    for at in reversed(range(*task.meta["spans"][link])):
        if suspected is not None and task.meta["places"][at] not in suspected:
            continue
        verdict = "yes" if stands[at] == asked[at] else "no"
        number = task.meta["places"][at][1]
        thought.append(f"- {should[-1 - at]} | {number}: {words_of(stands[at])} {verdict}")
    return "\n".join(thought)


def _guess(task: Task, link: int, rng: random.Random) -> Change:
    """A line of a function of the chain becomes some mistake for it."""
    at = rng.randrange(*task.meta["spans"][link])
    return _change(task, at, rng.choice(alternatives(task.meta["broken"][at])))


def misnamed_line(task: Task) -> int:
    """The number of the line whose call has a wrong name."""
    wrong, _ = task.meta["misnamed"]
    lines = split_lines(task.files[task.meta["cause"]])
    return next(i for i, line in enumerate(lines, start=1) if f" {wrong}(" in line)


def _named_right(task: Task) -> Change:
    """The right name in that line."""
    path, number = task.meta["cause"], misnamed_line(task)
    line = split_lines(task.files[path])[number - 1]
    return Change(path, number, line.replace(*task.meta["misnamed"]))


def _change(task: Task, at: int, step: Step) -> Change:
    """A step in the place of another one."""
    path, number = task.meta["places"][at]
    (span,) = (one for one in task.meta["spans"] if at in range(*one))
    changed = _with(task.meta["broken"], at, step)
    return Change(path, number, split_lines(body(changed[slice(*span)], "ints"))[at - span[0]])


def _with(program: Program, at: int, step: Step) -> Program:
    return (*program[:at], step, *program[at + 1 :])


def _failures(task: Task, at: int, step: Step) -> tuple[Failed, ...]:
    """The visible tests that fail with a step in another one's place, in order."""
    attempt = _with(task.meta["broken"], at, step)
    failures = []
    for case in task.visible_tests.cases:
        value = evaluate(attempt, case.args[0])
        if isinstance(value, Failure) or value != case.expected:
            failures.append(Failed(case, value))
    return tuple(failures)
