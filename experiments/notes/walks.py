"""Demonstrations of the three kinds of episodes, in exactly the words of an episode.

request: search the function, read along its imports, think about each line, change one.
idle: read each file, and note of its function what each line does, and which function it calls.
reminded: recall the notes on the function and on those that it calls, think about each line, change
  one.

A thought says of a line its number, what it should do, what it does, and whether that is the same.
It ends with the line that is to be changed. So both kinds of tasks think the same of each line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.notes.repositories import Line, Repository, note
from rl_code.config.named import Named
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.grep import Found, Match
from rl_code.environment.tools.grep import describe as describe_found
from rl_code.environment.tools.read_file import shown
from rl_code.text.lines import split_lines
from rl_code.types import Task, ToolCall, ToolResult

_PROTOCOL = Compact()
_TOOLS = find_tools(
    (
        Named("grep"),
        Named("read_file", {"numbered": True}),
        Named("think"),
        Named("replace_lines"),
        Named("memory_store"),
        Named("memory_recall", {"most": 1}),
        Named("submit"),
    )
)
_SUBMIT = ToolCall("submit", {})
_THOUGHT = ToolResult("think", "ok")
_STORED = ToolResult("memory_store", "stored")

# The calls of a message, and what they are answered; nothing behind a submit.
Message = tuple[tuple[ToolCall, ...], tuple[ToolResult, ...]]


def played(repository: Repository, task: Task) -> tuple[tuple[str, bool], ...]:
    """The demonstration behind the prompt of a task: (text, whether the agent writes it)."""
    walk = {"request": _request, "idle": _idle, "reminded": _reminded}[task.meta["kind"]]
    texts: list[tuple[str, bool]] = []
    for calls, results in walk(repository, task):
        texts.append((_PROTOCOL.message(calls, _TOOLS), True))
        if results:
            texts.append((_PROTOCOL.observation(results), False))
    return tuple(texts)


def _request(repository: Repository, task: Task) -> Iterator[Message]:
    pattern = f"def {task.entry_point}"
    found = [
        Match(path, number, line)
        for path, text in repository.files.items()
        for number, line in enumerate(split_lines(text), start=1)
        if pattern in line
    ]
    told = describe_found(Found(found, len(found)), verbose=False)
    yield (ToolCall("grep", {"pattern": pattern}),), (ToolResult("grep", told),)
    yield from _inward(repository, task, _reading)


def _inward(
    repository: Repository,
    task: Task,
    look: Callable[[Repository, int], tuple[ToolCall, ToolResult]],
) -> Iterator[Message]:
    """Along the calls of the function that is asked about: looks at a function, thinks about each
    of its lines, and goes on with the one that it calls, up to the line that is to be changed.
    """
    before: tuple[ToolCall, ...] = ()
    passed = 0
    for at in repository.chain(task.meta["symptom"]):
        call, result = look(repository, at)
        yield (*before, call), (*(_THOUGHT,) * len(before), result)
        lines = repository.lines(at)
        before = (_thought(task, lines, passed),)
        passed += len(lines)
        if task.meta["changed"] < passed:
            break
    yield (*before, _change(repository, task), _SUBMIT), ()


def _idle(repository: Repository, task: Task) -> Iterator[Message]:
    before: tuple[ToolCall, ...] = ()
    for at, function in enumerate(repository.functions):
        read, text = _reading(repository, at)
        yield (*before, read), (*(_STORED,) * len(before), text)
        stored = {"name": function.name, "text": note(repository, at)}
        before = (ToolCall("memory_store", stored),)
    # what stands in the message that submits is not answered, and not kept (``note_book``)
    yield before, (_STORED,)
    yield (_SUBMIT,), ()


def _reminded(repository: Repository, task: Task) -> Iterator[Message]:
    yield from _inward(repository, task, _recalling)


def _recalling(repository: Repository, at: int) -> tuple[ToolCall, ToolResult]:
    """The call that recalls the note on a function, and its result."""
    name = repository.functions[at].name
    told = f"{name}: {note(repository, at)}"
    return ToolCall("memory_recall", {"question": name}), ToolResult("memory_recall", told)


def _reading(repository: Repository, at: int) -> tuple[ToolCall, ToolResult]:
    """The call that reads the file of a function, and its result."""
    path = repository.paths[at]
    text = shown(path, repository.files[path], verbose=False, first=1)
    return ToolCall("read_file", {"path": path}), ToolResult("read_file", text)


def _thought(task: Task, lines: Sequence[Line], passed: int) -> ToolCall:
    """Parts of each of these lines, up to the one that is to be changed. passed: how many lines
    stand before them on the way inward.
    """
    should = split_lines(task.messages[0]["content"])[0].partition(": ")[2].split(", ")
    thought = []
    for at, line in enumerate(lines, start=passed):
        verdict = "no" if at == task.meta["changed"] else "yes"
        thought.append(f"{line.number}: {should[at]} | {line.words} {verdict}")
        if verdict == "no":
            break
    return ToolCall("think", {"thought": "\n".join(thought)})


def _change(repository: Repository, task: Task) -> ToolCall:
    chain = repository.chain(task.meta["symptom"])
    line = [line for at in chain for line in repository.lines(at)][task.meta["changed"]]
    text = line.text(task.meta["wanted"])
    return ToolCall("replace_lines", {"path": line.path, "first_line": line.number, "text": text})
