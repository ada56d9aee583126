"""Imperfect demonstrations of tasks that are made up here, written like an episode: in the compact
protocol, or, for repositories, as an agent of others writes it.

They teach the form of an episode and a variety of attempts. To find a good policy is left to
reinforcement learning. What the tests say is computed from the operations themselves, so nothing is
executed in a sandbox.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from models.marks import Marks
from rl_code.config.read_config import shares
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.parts import Part, prompt_parts, result_parts
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.run_tests import describe, failed_case
from rl_code.environment.tools.text import show
from rl_code.environment.tools.tool import Tool
from rl_code.harness.agent import Agent
from rl_code.harness.command_chat import CommandChat
from rl_code.tasks import infill, jumps, lookup, repository_walks, walks_in_tools
from rl_code.tasks.operations import OPERATIONS, Failure
from rl_code.tasks.programs import Program, evaluate, source, wrong_version
from rl_code.tasks.walks_in_shell import ShellWords
from rl_code.tasks.walks_in_tools import ToolWords
from rl_code.types import Limits, Task, ToolCall, ToolResult

_PROTOCOL = Compact()
_INFILL = Infill()
# Those of a tokenizer that is trained on demonstrations.
_MARKS = Marks(_PROTOCOL.SPECIAL_TOKENS)
_TOOLS = find_tools()
_WRITTEN = ToolResult("write_file", "ok")
_SUBMIT = ToolCall("submit", {})
_TEST = ToolCall("run_tests", {})
# The key of ``task.meta`` with a demonstration that the task's source wrote: pairs (text behind the
# prompt, whether the agent writes it).
PLAYED = "played"
_TRIES = 20  # draws of a wrong attempt that was not made before


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig:
    """Probabilities of the imperfections of demonstrations."""

    # Probability that an attempt is right; else it is a plausible mistake.
    p_right: float = 0.65
    # Probability that an attempt is tested; else it is submitted as it stands.
    p_test: float = 0.5
    # Probability that the file is submitted as it stands after a test failed; else there is a new
    # attempt.
    p_give_up: float = 0.4
    # Probability that a file of a repository, once read, is changed without a thought, and handed
    # in. Other tasks have nothing to read.
    p_guess: float = 0.0
    # Probability that the files of a repository are checked first where a tool does that
    # (``diagnostics``), and that what it tells is used; else the walk goes on without it. Below 1
    # the tool is shown rarely, and clumsily.
    p_check: float = 1.0
    p_heed: float = 1.0
    # Probability that a walk through a repository writes tests of its own before it hands in, where
    # there is ``write_tests``.
    p_own_tests: float = 0.0

    def __post_init__(self):
        shares(self, *(field.name for field in dataclasses.fields(self)))


# Texts for the hole of a task, by the task's source: (task, draws, probability that it is right).
FILLED: dict[str, Callable[[Task, random.Random, float], str]] = {
    infill.SOURCE: infill.demonstrate,
    jumps.SOURCE: jumps.demonstrate,
}

# Tools that demonstrations call, by the way in which they are written (``Source.demonstrated``).
# Those of repositories use what there is (``walks_in_tools.check_tools``), and what a source wrote
# itself is its own matter.
NEEDS = {
    "generated": ("write_file", "run_tests", "submit"),
    "lookup": ("edit_file", "submit"),
    repository_walks.SOURCE: (),
    infill.SOURCE: (),
    jumps.SOURCE: (),
    PLAYED: (),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Way to attempt the tasks of a source."""

    # The call that makes an attempt.
    call: Callable[[Task, Program], ToolCall]
    # A plausible mistake.
    wrong: Callable[[Task, random.Random], Program]


# By the source of a task, ``task.meta["source"]``.
KINDS = {
    "generated": Kind(
        call=lambda task, attempt: ToolCall(
            "write_file",
            {
                "path": task.path,
                "content": source(attempt, OPERATIONS[task.meta["program"][0][0]].takes),
            },
        ),
        wrong=lambda task, rng: wrong_version(task.meta["program"], rng),
    ),
    "lookup": Kind(
        # an edit fits once: there is no second attempt, since there are no tests to run
        call=lookup.fill_in,
        wrong=lookup.wrong_lookup,
    ),
}


@dataclasses.dataclass(frozen=True)
class Segment:
    """A span of an episode's text. Each is tokenised on its own."""

    # With quoted marks (``models.marks``) where it says what is not the protocol's own.
    text: str
    # True if the agent writes it.
    sampled: bool
    # True if it is a document (``rl_code.environment.documents``).
    document: bool = False
    # True if it may be learned. False for mistakes of the agent, which stand there for what
    # follows from it.
    learned: bool = True


def walk_words(
    protocol: Protocol,
    tools: Mapping[str, Tool],
    documents: DocumentsConfig | None,
    chat: CommandChat | None,
) -> ToolWords | ShellWords:
    """Words in which walks through repositories are said: as a conversation with an agent of
    others (``Agent.chat``), or, where ``chat`` is None, as calls of tools.

    tools: those of the config. Where they do not do for a walk, those that do; a tokenizer that
    is trained on walks need not be of a run that shows them.
    """
    if chat is not None:
        return ShellWords(chat)
    try:
        walks_in_tools.check_tools(tools)
    except ValueError:
        tools = walks_in_tools.TOOLS
    return ToolWords(tools, documents, protocol if isinstance(protocol, Compact) else Compact())


def check_demonstrable(
    protocol: Protocol,
    tools: Mapping[str, Tool],
    ways: Sequence[str],
    agent: Agent | None = None,
) -> None:
    """Raises ValueError unless what demonstrations teach can be said in an episode.

    ways: those of the tasks' source (``Source.demonstrated``). agent: the agent of others that
    plays; None for our own.
    """
    for way in ways:
        if way not in NEEDS:
            raise ValueError(f"demonstrated={way!r} must be some of {', '.join(NEEDS)}")
        wanted = Infill if way in FILLED else Compact
        if not isinstance(protocol, wanted) or not set(NEEDS[way]) <= tools.keys():
            called = f" with {', '.join(NEEDS[way])}" if NEEDS[way] else ""
            raise ValueError(
                f"demonstrations of {way} are written in the protocol "
                f"{wanted.__name__.lower()!r}{called}, and episodes have "
                f"{type(protocol).__name__} with {', '.join(tools)}; leave sft out"
            )
        if way == repository_walks.SOURCE:
            _check_walks(tools, agent)


def _check_walks(tools: Mapping[str, Tool], agent: Agent | None) -> None:
    if agent is None:
        walks_in_tools.check_tools(tools)
    elif agent.chat is None:
        raise ValueError(
            f"demonstrations of repositories are written for agents whose conversation is known, "
            f"as that of mini_swe_agent with calls='text' and templates, and not for {agent}; "
            "leave sft out"
        )


def demonstrate(
    task: Task,
    rng: random.Random,
    config: DemonstrationConfig,
    limits: Limits,
    documents: DocumentsConfig | None = None,
    words: ToolWords | ShellWords | None = None,
) -> list[Segment]:
    """One episode of a task, prompt first; no attempt is made twice. Or a drill, of which only the
    values that are asked for are learned. Or, where a source says so (``task.meta["hands_in"]``), a
    file with that text is handed in at once. Or what the source wrote (``task.meta[PLAYED]``).

    documents: which parts of the texts are documents; None for none. words: in which a walk through
    a repository is said (``walk_words``); None for calls of ``walks_in_tools.TOOLS``.

    It keeps to the turns and test runs of ``limits``; budgets of tokens are ignored. Raises
    ValueError for a task of a source that is not in KINDS nor of repositories, or when ``limits``
    leave no room for a first attempt.
    """
    if fill := FILLED.get(task.meta.get("source", "")):
        text = fill(task, rng, config.p_right)
        prompt = Segment(_INFILL.prompt(task, {}), False)
        return [prompt, Segment(_INFILL.message(text), True)]
    if task.meta.get("source") == repository_walks.SOURCE:
        return _walked(
            task, rng, config, limits, words or ToolWords(walks_in_tools.TOOLS, documents)
        )
    if PLAYED in task.meta:
        prompt = _given(prompt_parts(_PROTOCOL, task, _TOOLS, documents, _MARKS))
        return [*prompt, *(Segment(text, sampled) for text, sampled in task.meta[PLAYED])]
    if task.meta.get("source") not in KINDS:
        known = (*KINDS, repository_walks.SOURCE, *FILLED)
        raise ValueError(
            f"{task.id}: only tasks of {', '.join(known)} can be demonstrated, not "
            f"{task.meta.get('source')!r}"
        )
    kind = KINDS[task.meta["source"]]
    if limits.turns < 1:
        raise ValueError(f"{limits.turns=} must be at least 1")
    segments = _given(prompt_parts(_PROTOCOL, task, _TOOLS, documents, _MARKS))
    if "drill" in task.meta:
        return [*segments, *_drill(task.meta["drill"])]
    if "hands_in" in task.meta:
        write = ToolCall("write_file", {"path": task.path, "content": task.meta["hands_in"]})
        return [*segments, _message(write, _SUBMIT)]
    tried = {task.meta["program"], task.meta["broken"]}
    turns = limits.turns
    # without a visible test a run tells nothing
    runs = limits.test_runs if len(task.visible_tests) else 0
    while True:
        attempt = _attempt(task, kind, rng, config, tried)
        write = kind.call(task, attempt)
        if turns < 2 or runs < 1 or rng.random() >= config.p_test:
            return [*segments, _message(write, _SUBMIT)]
        turns = turns - 1
        runs = runs - 1
        failed = failures(task, attempt, verbose=False)
        told = ToolResult(
            "run_tests", describe(failed, len(task.visible_tests), runs, verbose=False)
        )
        answer = result_parts(_PROTOCOL, (_WRITTEN, told), _TOOLS, documents, _MARKS)
        segments += [_message(write, _TEST), *_given(answer)]
        if not failed or rng.random() < config.p_give_up:
            return [*segments, _message(_SUBMIT)]


def failures(task: Task, attempt: Program, *, verbose: bool) -> list[str]:
    """Texts of the visible tests that an attempt at a generated task fails, in order, as
    ``run_tests`` words them.
    """
    texts = []
    for case in task.visible_tests.cases:
        value = evaluate(attempt, case.args[0])
        error = value.error if isinstance(value, Failure) else ""
        if error or value != case.expected:
            shown = "" if error else show(value)
            texts.append(failed_case(task.entry_point, case, shown, error, verbose=verbose))
    return texts


def _walked(
    task: Task,
    rng: random.Random,
    config: DemonstrationConfig,
    limits: Limits,
    words: ToolWords | ShellWords,
) -> list[Segment]:
    """The demonstration of a task with a repository."""
    segments = _given(words.opening(task))
    walk = repository_walks.walk(
        task,
        rng,
        words.limits(limits),
        config.p_right,
        config.p_test,
        config.p_give_up,
        config.p_guess,
        words.checks and _happens(config.p_check, rng),
        words.blames,
        _happens(config.p_heed, rng),
    )
    if words.writes and config.p_own_tests:
        walk = repository_walks.with_tests(walk, task, rng, config.p_own_tests)
    for message in walk:
        for text, answer in words.say(task, message):
            segments.append(Segment(text, True, learned=message.right))
            segments += _given(answer)
    return segments


def _happens(probability: float, rng: random.Random) -> bool:
    """True with a probability; what is certain draws nothing."""
    return probability >= 1.0 or rng.random() < probability


def _drill(asked: Sequence[tuple[str, int]]) -> list[Segment]:
    """The message of a drill: a call that writes a file, with names that are given."""
    write = ToolCall("write_file", {"path": "", "content": ""})
    beginning = _PROTOCOL.message([write], _TOOLS).partition("\n")[0]
    segments = []
    for name, value in asked:
        segments += [Segment(f"{beginning}\n{name} =", False), Segment(f" {value}", True)]
        beginning = ""
    return segments


def _given(parts: Sequence[Part]) -> list[Segment]:
    return [Segment(text, False, is_document) for text, is_document in parts]


def _message(*calls: ToolCall) -> Segment:
    return Segment(_PROTOCOL.message(calls, _TOOLS), True)


def _attempt(
    task: Task,
    kind: Kind,
    rng: random.Random,
    config: DemonstrationConfig,
    tried: set[Program],
) -> Program:
    if rng.random() >= config.p_right:
        for _ in range(_TRIES):
            wrong = kind.wrong(task, rng)
            if wrong not in tried:
                tried.add(wrong)
                return wrong
    return task.meta["program"]
