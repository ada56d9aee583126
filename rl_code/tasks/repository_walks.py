"""Imperfect demonstrations of repository tasks: search, read along the imports, think, try lines,
submit.

Of each line of a function that was read a thought says in words what it should do by the message,
what it does, and whether that is the same. A model that learns this from nothing is told by it
which lines belong to which words. Where a line is wrong it is changed and tried (``try_lines``), or
changed and submitted untested; else the function that is called is read.

Some walks go wrong first: a thought sees a fault where there is none, takes the fault for something
else, or overlooks it. Then the walk begins again from the symptom, as if nothing had been thought
before. What is wrong stands there and is not learned: a model makes mistakes enough of its own, and
from thoughts that are wrong it would learn more slowly what is right. What it learns is to begin
again, and not to believe what it thought before.

Some walks guess: without a thought a line of the file that was just read is changed into something
that is easily taken for it, and submitted. That is learned, since it is a bad habit and not a wrong
belief: what the model knows does not suffer from it, and reinforcement learning can tell it from
the careful habit by what each earns.

What the tools say is computed from the files and the operations, in exactly the words of an
episode; nothing is executed in a sandbox.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rl_code.environment.tools import tool as tool_lib
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.grep import Found, Grep, Match
from rl_code.environment.tools.grep import describe as describe_found
from rl_code.environment.tools.read_file import ReadFile, shown
from rl_code.environment.tools.run_tests import describe, failed_case
from rl_code.environment.tools.text import show
from rl_code.environment.tools.tool import Tool
from rl_code.named import Named
from rl_code.tasks.operations import Failure
from rl_code.tasks.programs import Program, Step, body, describe_inward, evaluate, words_of
from rl_code.tasks.repositories import alternatives
from rl_code.types import Limits, Task, ToolCall, ToolResult

# Of ``task.meta["source"]``.
SOURCE = "repositories"
# What the demonstrations call.
TOOLS = find_tools(
    (
        Named("grep"),
        Named("read_file", {"numbered": True}),
        Named("think"),
        Named("replace_lines"),
        Named("try_lines"),
        Named("submit"),
    )
)


class Message(NamedTuple):
    """A message of an episode."""

    calls: tuple[ToolCall, ...]
    # None behind a submit.
    results: tuple[ToolResult, ...]
    # Whether it is right, and so may be learned.
    right: bool = True


class Mistake(NamedTuple):
    """What a walk that goes wrong takes for something else."""

    # The function of the chain.
    link: int
    # Index of the step in ``program``.
    at: int
    # What the line should do in its view; None where it overlooks the fault.
    step: Step | None


_GREP = Grep()
_READ = ReadFile(numbered=True)
_SUBMIT = ToolCall("submit", {})
_THOUGHT = ToolResult("think", "ok")


def check_tools(tools: Mapping[str, Tool]) -> None:
    """Raises ValueError where a tool is written in another way than in demonstrations, or answers
    otherwise.
    """
    for name, tool in TOOLS.items():
        written, other = tool_lib.words_of(tool), tool_lib.words_of(tools[name])
        if written != other:
            raise ValueError(
                f"demonstrations of repositories write {name} as {written}, and the tool of the "
                f"config as {other}; leave sft out"
            )
    for tool in (_GREP, _READ):
        if tools[tool.name] != tool:
            raise ValueError(
                f"demonstrations of repositories show what {tool} answers, and the config has "
                f"{tools[tool.name]}; give it the same settings, or leave sft out"
            )


def walk(
    task: Task,
    rng: random.Random,
    limits: Limits,
    p_right: float,
    p_test: float,
    p_give_up: float,
    p_guess: float,
) -> Iterator[Message]:
    """The messages of one episode.

    The probabilities are those of ``DemonstrationConfig``. It keeps to the turns and test runs of
    ``limits``; budgets of tokens are ignored. Raises ValueError when there are too few turns to
    come to the cause.
    """
    chain = task.meta["chain"]
    cause = chain.index(task.meta["cause"])
    if limits.turns < cause + 3:
        raise ValueError(f"{limits.turns=} must be at least {cause + 3} for {task.id}")
    pattern = f"def {task.entry_point}"
    grep = ToolCall("grep", {"pattern": pattern})
    found = ToolResult("grep", describe_found(_search(task, pattern), verbose=False))
    yield Message((grep,), (found,))
    turns, runs = limits.turns - 1, limits.test_runs
    before: tuple[ToolCall, ...] = ()
    right = True
    while True:
        mistake = None
        # one that goes wrong leaves turns for one that does not
        if rng.random() >= p_right and turns > len(chain) + cause + 3 and runs > 1:
            mistake = _mistake(task, rng)
        overlooked = mistake is not None and mistake.step is None
        last = len(chain) - 1 if overlooked else cause if mistake is None else mistake.link
        for link in range(last + 1):
            read, text = _reading(task, link)
            yield Message((*before, read), (*(_THOUGHT,) * len(before), text), right)
            turns -= 1
            if rng.random() < p_guess:
                yield Message((_guess(task, link, rng), _SUBMIT), ())
                return
            before = (_thought(task, link, mistake),)
            right = mistake is None or link != mistake.link
        if overlooked:
            continue
        at = task.meta["fault"] if mistake is None else mistake.at
        step = task.meta["program"][at] if mistake is None else mistake.step
        change = _change(task, at, step)
        if right and (turns < 2 or runs < 1 or rng.random() >= p_test):
            yield Message((*before, ToolCall("replace_lines", change), _SUBMIT), ())
            return
        turns -= 1
        runs -= 1
        failures = _failures(task, at, step)
        told = describe(failures, len(task.visible_tests), runs, verbose=False)
        attempt = ToolCall("try_lines", change)
        yield Message((*before, attempt), (_THOUGHT, ToolResult("try_lines", told)), right)
        before, right = (), True
        if not failures or rng.random() < p_give_up:
            yield Message((_SUBMIT,), ())
            return


def _mistake(task: Task, rng: random.Random) -> Mistake:
    """A mistake in one of the functions from the symptom to the cause."""
    cause = task.meta["chain"].index(task.meta["cause"])
    link = rng.randrange(cause + 1)
    at = task.meta["fault"] if link == cause else rng.randrange(*task.meta["spans"][link])
    # what stands there is right, or it is the fault, which has to be taken for something else
    wrong = [s for s in alternatives(task.meta["broken"][at]) if s != task.meta["program"][at]]
    overlooks = link == cause and (not wrong or rng.random() < 0.5)
    return Mistake(link, at, None if overlooks else rng.choice(wrong))


def _reading(task: Task, link: int) -> tuple[ToolCall, ToolResult]:
    """The call that reads a file of the chain, and its result."""
    path = task.meta["chain"][link]
    text = shown(path, task.files[path], verbose=False, first=1)
    return ToolCall("read_file", {"path": path}), ToolResult("read_file", text)


def _thought(task: Task, link: int, mistake: Mistake | None) -> ToolCall:
    """Of each line of a function of the chain, the last one first: what it should do, its number,
    what it does, and whether that is the same.

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
        verdict = "yes" if stands[at] == asked[at] else "no"
        number = task.meta["places"][at][1]
        thought.append(f"- {should[-1 - at]} | {number}: {words_of(stands[at])} {verdict}")
    return ToolCall("think", {"thought": "\n".join(thought)})


def _guess(task: Task, link: int, rng: random.Random) -> ToolCall:
    """The call that changes a line of a function of the chain into some mistake for it."""
    at = rng.randrange(*task.meta["spans"][link])
    step = rng.choice(alternatives(task.meta["broken"][at]))
    return ToolCall("replace_lines", _change(task, at, step))


def _change(task: Task, at: int, step: Step) -> dict[str, Any]:
    """The arguments of a call that puts a step in the place of another one."""
    path, number = task.meta["places"][at]
    return {"path": path, "first_line": number, "text": _line(task, at, step)}


def _line(task: Task, at: int, step: Step) -> str:
    """The line with a step in the place of another one."""
    (span,) = (one for one in task.meta["spans"] if at in range(*one))
    changed = _with(task.meta["broken"], at, step)
    return body(changed[slice(*span)], "ints").splitlines()[at - span[0]]


def _with(program: Program, at: int, step: Step) -> Program:
    return (*program[:at], step, *program[at + 1 :])


def _search(task: Task, pattern: str) -> Found:
    """What grep finds, of files that are few and all in one folder."""
    matches = [
        Match(path, number, line)
        for path, text in sorted(task.files.items())
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(pattern, line)
    ]
    return Found(matches[: _GREP.most], len(matches))


def _failures(task: Task, at: int, step: Step) -> Sequence[str]:
    """Texts of the visible tests that fail with a step in another one's place, in order."""
    attempt = _with(task.meta["broken"], at, step)
    failures = []
    for case in task.visible_tests.cases:
        value = evaluate(attempt, case.args[0])
        error = value.error if isinstance(value, Failure) else ""
        if error or value != case.expected:
            told = "" if error else show(value)
            failures.append(failed_case(task.entry_point, case, told, error, verbose=False))
    return failures
