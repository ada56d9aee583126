"""Imperfect demonstrations of repository tasks: search, read along the imports, think, try lines,
submit.

Of each line of a function that was read a thought says in words what it should do by the message,
what it does, and whether that is the same. A model that learns this from nothing is told by it
which lines belong to which words. Thoughts are always right, since a model learns more slowly from
some that are wrong.

Attempts are not. A wrong one puts another mistake in the fault's place. Now and then something is
tried in a function that is right, and then the walk goes on. Each attempt is drawn for itself,
whatever failed before, and has the thought in front of it again; only what failed is not tried
again. So a second attempt is written as a first one is, and what a model learns of one helps with
the other. An attempt is tried (``try_lines``), or put in its place and submitted untested.

What the tools say is computed from the files and the operations, in exactly the words of an
episode; nothing is executed in a sandbox.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

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
# A message of an episode: its calls, and their results; none behind a submit.
Message = tuple[tuple[ToolCall, ...], tuple[ToolResult, ...]]

_GREP = Grep()
_READ = ReadFile(numbered=True)
_SUBMIT = ToolCall("submit", {})
_THOUGHT = ToolResult("think", "ok")
# Probability of an attempt in a function of the chain that is right.
_P_LOST = 0.05


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
) -> Iterator[Message]:
    """The messages of one episode.

    The probabilities are those of ``DemonstrationConfig``. It keeps to the turns and test runs of
    ``limits``; budgets of tokens are ignored. Raises ValueError when there are too few turns to
    come to the cause.
    """
    cause = task.meta["chain"].index(task.meta["cause"])
    if limits.turns < cause + 3:
        raise ValueError(f"{limits.turns=} must be at least {cause + 3} for {task.id}")
    pattern = f"def {task.entry_point}"
    grep = ToolCall("grep", {"pattern": pattern})
    found = ToolResult("grep", describe_found(_search(task, pattern), verbose=False))
    yield (grep,), (found,)
    # messages beyond the search and the readings
    turns = limits.turns - cause - 2
    runs = limits.test_runs
    before: tuple[ToolCall, ...] = ()
    for link in range(cause + 1):
        read, text = _reading(task, link)
        yield (*before, read), (*(_THOUGHT,) * len(before), text)
        before = (_thought(task, link),)
        right = p_right if link == cause else 0.0
        for at, step in _attempts(task, link, rng, right):
            lost = link < cause
            if lost and (turns < 3 or runs < 1 or rng.random() >= _P_LOST):
                break
            path, number = task.meta["places"][at]
            change = {"path": path, "first_line": number, "text": _line(task, at, step)}
            if not lost and (turns < 2 or runs < 1 or rng.random() >= p_test):
                yield (*before, ToolCall("replace_lines", change), _SUBMIT), ()
                return
            turns -= 1
            runs -= 1
            failures = _failures(task, at, step)
            told = describe(failures, len(task.visible_tests), runs, verbose=False)
            yield (
                (*before, ToolCall("try_lines", change)),
                (_THOUGHT, ToolResult("try_lines", told)),
            )
            if not failures or (not lost and rng.random() < p_give_up):
                yield (_SUBMIT,), ()
                return


def _reading(task: Task, link: int) -> tuple[ToolCall, ToolResult]:
    """The call that reads a file of the chain, and its result."""
    path = task.meta["chain"][link]
    text = shown(path, task.files[path], verbose=False, first=1)
    return ToolCall("read_file", {"path": path}), ToolResult("read_file", text)


def _thought(task: Task, link: int) -> ToolCall:
    """Of each line of a function of the chain, the last one first: its number, what it should do,
    what it does, and whether that is the same.
    """
    asked = describe_inward(task.meta["program"])
    thought = []
    for at in reversed(range(*task.meta["spans"][link])):
        does = task.meta["broken"][at]
        verdict = "yes" if does == task.meta["program"][at] else "no"
        number = task.meta["places"][at][1]
        thought.append(f"{number}: {asked[-1 - at]} | {words_of(does)} {verdict}")
    return ToolCall("think", {"thought": "\n".join(thought)})


# A step of the program, and what is put in its place.
Attempt = tuple[int, Step]


def _attempts(task: Task, link: int, rng: random.Random, p_right: float) -> Iterator[Attempt]:
    """Attempts without end in a function of the chain: the right one with the probability
    ``p_right``, else a mistake that was not made before, while there is one: in the line of the
    fault, or in any where the function is right.
    """
    fault = task.meta["fault"]
    right: Attempt = (fault, task.meta["program"][fault])
    start, end = task.meta["spans"][link]
    places = (fault,) if start <= fault < end else range(start, end)
    wrong = [
        (at, step)
        for at in places
        for step in alternatives(task.meta["broken"][at])
        if (at, step) != right
    ]
    rng.shuffle(wrong)
    while wrong or p_right > 0:
        yield right if rng.random() < p_right or not wrong else wrong.pop()


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
