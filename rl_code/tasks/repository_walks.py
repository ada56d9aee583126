"""Imperfect demonstrations of repository tasks: search, read, follow the imports, edit, run the
tests, submit.

Of each function that was read a thought says in words what it does, and below what it should do by
the message. Where the two differ is the fault. A model that learns this from nothing is told by it
which lines belong to which words.

What the tools say is computed from the files and the operations, in exactly the words of an
episode; nothing is executed in a sandbox.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.grep import Found, Grep, Match
from rl_code.environment.tools.grep import describe as describe_found
from rl_code.environment.tools.read_file import ReadFile, shown
from rl_code.environment.tools.run_tests import describe, failed_case
from rl_code.environment.tools.text import show
from rl_code.environment.tools.tool import Tool, words_of
from rl_code.named import Named
from rl_code.tasks.operations import Failure
from rl_code.tasks.programs import Program, Step, describe_inward, evaluate
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
        Named("run_tests"),
        Named("submit"),
    )
)
# A message of an episode: its calls, and their results; none behind a submit.
Message = tuple[tuple[ToolCall, ...], tuple[ToolResult, ...]]

_GREP = Grep()
_READ = ReadFile(numbered=True)
_SUBMIT = ToolCall("submit", {})
_TEST = ToolCall("run_tests", {})
_EDITED = ToolResult("replace_lines", "ok")
_THOUGHT = ToolResult("think", "ok")


def check_tools(tools: Mapping[str, Tool]) -> None:
    """Raises ValueError where a tool is written in another way than in demonstrations, or answers
    otherwise.
    """
    for name, tool in TOOLS.items():
        if words_of(tools[name]) != words_of(tool):
            raise ValueError(
                f"demonstrations of repositories write {name} as {words_of(tool)}, and the tool "
                f"of the config as {words_of(tools[name])}; leave sft out"
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
    chain = task.meta["chain"]
    cause = chain.index(task.meta["cause"])
    turns = limits.turns - cause - 2
    if turns < 1:
        raise ValueError(f"{limits.turns=} must be at least {cause + 3} for {task.id}")
    pattern = f"def {task.entry_point}"
    grep = ToolCall("grep", {"pattern": pattern})
    found = ToolResult("grep", describe_found(_search(task, pattern), verbose=False))
    yield (grep,), (found,)
    thoughts = [_thought(task, link) for link in range(cause + 1)]
    for link, path in enumerate(chain[: cause + 1]):
        read = ToolCall("read_file", {"path": path})
        text = ToolResult("read_file", shown(path, task.files[path], verbose=False, first=1))
        # what was read last is thought about first
        yield (*thoughts[:link][-1:], read), (*(_THOUGHT,) * min(link, 1), text)
    edits = _edits(task, rng, turns, limits.test_runs, p_right, p_test, p_give_up)
    calls, results = next(edits)
    yield (thoughts[-1], *calls), (_THOUGHT, *results) if results else ()
    yield from edits


def _thought(task: Task, link: int) -> ToolCall:
    """What a function of the chain does, and what it should do."""
    start, end = task.meta["spans"][link]
    lines = (describe_inward(task.meta[kind][start:end]) for kind in ("broken", "program"))
    return ToolCall("think", {"thought": "\n".join(lines)})


def _edits(
    task: Task,
    rng: random.Random,
    turns: int,
    runs: int,
    p_right: float,
    p_test: float,
    p_give_up: float,
) -> Iterator[Message]:
    """The messages from the first attempt on; no attempt is made twice."""
    lines = dict(task.meta["lines"])
    at = task.meta["fault"]
    right = task.meta["program"][at]
    stands = task.meta["broken"][at]
    cause = task.meta["cause"]
    text = task.files[cause].splitlines()
    # the wrong line occurs once
    (number,) = (n for n, line in enumerate(text, start=1) if line.strip() == lines[stands])
    untried = [step for step in lines if step not in (right, stands)]
    rng.shuffle(untried)
    while True:
        step: Step = right
        if untried and rng.random() >= p_right:
            step = untried.pop()
        edit = ToolCall(
            "replace_lines",
            {"path": cause, "first_line": number, "text": f"    {lines[step]}"},
        )
        if turns < 2 or runs < 1 or rng.random() >= p_test:
            yield (edit, _SUBMIT), ()
            return
        turns -= 1
        runs -= 1
        failures = _failures(task, step)
        told = describe(failures, len(task.visible_tests), runs, verbose=False)
        yield (edit, _TEST), (_EDITED, ToolResult("run_tests", told))
        if not failures or rng.random() < p_give_up:
            yield (_SUBMIT,), ()
            return


def _search(task: Task, pattern: str) -> Found:
    """What grep finds, of files that are few and all in one folder."""
    matches = [
        Match(path, number, line)
        for path, text in sorted(task.files.items())
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(pattern, line)
    ]
    return Found(matches[: _GREP.most], len(matches))


def _failures(task: Task, step: Step) -> Sequence[str]:
    """Texts of the visible tests that fail with a step in the fault's place, in order."""
    at = task.meta["fault"]
    attempt: Program = (*task.meta["program"][:at], step, *task.meta["program"][at + 1 :])
    failures = []
    for case in task.visible_tests.cases:
        value = evaluate(attempt, case.args[0])
        error = value.error if isinstance(value, Failure) else ""
        if error or value != case.expected:
            told = "" if error else show(value)
            failures.append(failed_case(task.entry_point, case, told, error, verbose=False))
    return failures
