"""The vocabulary of the system: Task, Turn, Trajectory, Group, Reward.

Every other module speaks in these types and none of them has behaviour beyond reading itself. What
the learner makes of groups is in ``learner/batch.py``: whoever needs no device imports no jax.

Dimensions: T tokens of a context or trajectory.
"""

from __future__ import annotations

import dataclasses
import math
import posixpath
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

# Of a field that records leave out where it is None (``store.serialization``): records of runs that
# do not use the field are the same bytes as before there was one.
ONLY_WHERE_SET = types.MappingProxyType({"only_where_set": True})

# The most likely tokens that may be told beside a sampled one.
MOST_ALTERNATIVES = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One value-level test: a function called with ``args`` must return ``expected``."""

    # Plain Python values: None, bool, int, float, str, bytes, list, tuple, set, dict.
    args: tuple[Any, ...]
    expected: Any
    # None asks for the same types as well: True is not 1, 1 is not 1.0. A number asks for what
    # ``==`` accepts and lets numbers be that far apart, as suites written with
    # ``assert f(x) == y`` mean it.
    tolerance: float | None = None
    # The function called, as ``path/of/file.py:name``; "" for the task's own.
    target: str = ""

    def __post_init__(self) -> None:
        path, _, name = self.target.rpartition(":")
        if self.target and not (path and name):
            raise ValueError(f"{self.target=} must be path/of/file.py:function, or empty")


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of a repository, which pytest runs in the candidate's own interpreter."""

    # Path -> text of test files, and of files that configure tests, as they are laid over the work
    # before it is graded. None for a file that must not be there.
    files: Mapping[str, str | None]
    # Ids of tests as pytest writes them (``tests/test_a.py::test_b[1]``): those that fail on the
    # files that the agent starts from and must pass, and those that pass there and still must.
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    # Command that starts pytest in the workspace; options of the grader and paths of tests follow.
    command: tuple[str, ...] = ("python", "-m", "pytest")

    def __post_init__(self) -> None:
        ids = self.ids
        if not self.fail_to_pass or len(set(ids)) < len(ids):
            raise ValueError(
                f"{self.fail_to_pass=} must name a test, and no id may stand twice among it and "
                f"{self.pass_to_pass=}"
            )

    @property
    def ids(self) -> tuple[str, ...]:
        """All tests that must pass, each once."""
        return self.fail_to_pass + self.pass_to_pass


@dataclasses.dataclass(frozen=True)
class Script:
    """Test that is a program: what it writes into a file is the reward (Harbor's way)."""

    # Path below /tests -> content of the program's files.
    files: Mapping[str, bytes]
    # The program, one of these paths.
    program: str
    # Paths that may be executed.
    executable: tuple[str, ...] = ()
    # Wall-clock seconds that it may take, at most.
    timeout_s: float = 600.0
    # Its variables, besides those of the task's world.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.program not in self.files:
            raise ValueError(
                f"{self.program=} must be one of {', '.join(self.files) or 'no files'}"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"{self.timeout_s=} must be above 0 and finite")


@dataclasses.dataclass(frozen=True)
class Tests:
    """Tests that decide whether a task is solved."""

    # Value-level tests; expected values are compared outside the candidate's process.
    cases: tuple[Case, ...] = ()
    # Statements, each a test: ``assert f(2) == 4``, or ``def check(candidate): ...`` and a call of
    # it. They run in a trusted process in which the task's entry point is a proxy that calls the
    # candidate's process, so the expected values they contain never reach the candidate. One that
    # passed has a canary (``environment.suites.statements``).
    code: tuple[str, ...] = ()
    # A suite of the task's repository; each of its ids is a test, behind the other two kinds.
    suite: Suite | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # A program, one test behind all others, which passes where its reward is 1 or more. Only hidden
    # tests have one.
    script: Script | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    __test__ = False  # for pytest: no tests of ours

    def __len__(self) -> int:
        ids = () if self.suite is None else self.suite.ids
        return len(self.cases) + len(self.code) + len(ids) + (self.script is not None)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one episode."""

    # Messages that the assistant may write.
    turns: int
    # Tokens of the whole trajectory, prompt included, and places that pad documents to whole pages.
    tokens: int
    # Sampled tokens of one message of the assistant.
    turn_tokens: int
    # Calls of the tool run_tests.
    test_runs: int
    # Wall-clock seconds of one tool call.
    command_s: float
    # Calls of one message that are carried out; further ones count as malformed.
    calls: int = 32
    # Wall-clock seconds of all tool calls together; of an agent of others, those that its program
    # takes too. Time in which the episode waits for the sampler does not count, and grading has
    # time of its own.
    tools_s: float = 120.0
    # CPU seconds of all commands that tools run, together.
    tools_cpu_s: float = 120.0
    # Wall-clock seconds in which the work is graded. Tests that have not begun by then have failed.
    grade_s: float = 60.0

    def __post_init__(self) -> None:
        if self.calls < 1:
            raise ValueError(f"{self.calls=} must be at least 1")
        if not min(self.tools_s, self.tools_cpu_s, self.grade_s) > 0:
            raise ValueError(
                f"{self.tools_s=}, {self.tools_cpu_s=} and {self.grade_s=} must be above 0"
            )

    @property
    def most_sampled(self) -> int:
        """The most tokens that the policy can sample in one trajectory."""
        return min(self.turns * self.turn_tokens, self.tokens)

    @property
    def longest_wait_s(self) -> float:
        """Wall-clock seconds within which a message is answered and an episode graded, whatever a
        model does.
        """
        # The first edit is graded, too. What has begun when the time is up may still take its own:
        # cases and statements, each run once more after a timeout, and the same for a tool. Where
        # sandboxes are lost, calls are carried out again within the time that the episode has left.
        return self.tools_s + 2 * self.grade_s + 16 * self.command_s


@dataclasses.dataclass(frozen=True)
class Layer:
    """A read-only folder of the layer store, and where a world shows it."""

    # Its content address, "sha256:" and 64 hexadecimal digits (``environment.layers.store``).
    digest: str
    # The folder in the sandbox: the world's workspace, "/opt/packages" for Python packages (they
    # are on the path of imports), or "/" for a whole root file system.
    at: str

    def __post_init__(self) -> None:
        kind, _, digits = self.digest.partition(":")
        if kind != "sha256" or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
            raise ValueError(f"{self.digest=} must be sha256: and 64 hexadecimal digits")
        if not self.at.startswith("/") or posixpath.normpath(self.at) != self.at:
            raise ValueError(f"{self.at=} must be an absolute path in its shortest form")


@dataclasses.dataclass(frozen=True)
class World:
    """Contents of a task's workspace before anything is written to it.

    Layers at the same folder lie over each other, the last one on top. The workspace is an overlay
    over its layers, so an episode changes nothing but its own copy.
    """

    layers: tuple[Layer, ...]
    # The folder that the agent works in. Another one than /workspace needs a layer at "/".
    workspace: str = "/workspace"
    # Variables of commands, besides those of every sandbox.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        places = {layer.at for layer in self.layers}
        for place in sorted(places - {"/", self.workspace, "/opt/packages"}):
            raise ValueError(
                f"a layer at {place} must be at /, /opt/packages or the workspace {self.workspace}"
            )
        if self.workspace != "/workspace" and "/" not in places:
            raise ValueError(
                f"{self.workspace=} must be /workspace in a world without a layer at /"
            )
        if not self.workspace.startswith("/") or self.workspace in ("/", "/tmp", "/proc", "/dev"):
            raise ValueError(f"{self.workspace=} must be a folder of its own below /")


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem with its repository and its tests."""

    id: str
    # Chat messages, each ``{"role": ..., "content": ...}``, without the tools' declaration. The
    # content is a text, or parts of which some are documents (``environment.parts``).
    messages: tuple[Mapping[str, Any], ...]
    # Path -> text of the repository that the agent starts from.
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The file whose ``entry_point`` the cases and statements of tests call; "" and "" where the
    # tests are a suite.
    path: str = ""
    entry_point: str = ""
    # Empty where others say what the work is worth.
    visible_tests: Tests = Tests()
    hidden_tests: Tests = Tests()
    # Path -> text of a solution; never shown to the agent.
    reference: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Text that the assistant's first message starts with; "" for none.
    prefill: str = ""
    # Source, template, level, split and whatever else the source knows.
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Names of the tools that the agent may use; None for all that the config offers.
    tools: tuple[str, ...] | None = None
    # The layers below ``files``; None for a workspace that holds nothing else.
    world: World | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool as the model wrote it."""

    name: str
    # By name, as the tool's schema asks for them; empty for a malformed call.
    arguments: Mapping[str, Any]
    # Reason why the call is malformed, in words for the model; "" when it is not.
    error: str = ""
    # Name that the model gave the call, which its result repeats; "" where a protocol has none.
    id: str = ""


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """Result of a call."""

    name: str
    # Text that the model reads.
    content: str
    # False when the call was malformed or could not be carried out.
    ok: bool = True
    # Wall-clock time.
    seconds: float = 0.0
    # ``ToolCall.id`` of the call.
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One span of the tokens of a context: ``contexts[context].tokens[start:end]``."""

    role: Literal["prompt", "assistant", "tool"]
    # First and one past the last index into the context's own tokens.
    start: int
    end: int
    # The decoded span.
    text: str
    # Calls that the model made in an "assistant" turn, and their results, in the "tool" turn.
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    # Index of the context in ``Trajectory.contexts``.
    context: int = 0


@dataclasses.dataclass(frozen=True)
class Reward:
    """Reward of an episode."""

    # Number that the learner sees: the sum of the components.
    total: float
    # The weighted and capped signals by name, in the order of the config.
    components: Mapping[str, float]
    # Findings of the grader, such as a timeout or a proof of cheating; "fault" for the sandbox's.
    flags: tuple[str, ...] = ()
    # Notes of signals by component (``rewards.noted``): answers of a judge, the version of a reward
    # model and the text that it read. None where no signal writes any.
    notes: Mapping[str, Mapping[str, Any]] | None = dataclasses.field(
        default=None, metadata=ONLY_WHERE_SET
    )


@dataclasses.dataclass(frozen=True)
class Context:
    """A node of a trajectory's tree: tokens that follow what is kept of another context.

    The whole context, which is what the policy saw, is the first ``kept`` tokens of the whole
    parent and then ``tokens``. A summary that replaces a long context keeps the prompt of its
    parent; a sub-agent starts from a prefix of it, or is a root; an agent that rewrites its history
    keeps what it left as it was.
    """

    # int32 [T], the context's own tokens, without those that it keeps of its parent.
    tokens: np.ndarray
    # bool [T], True where the policy chose the token.
    sampled: np.ndarray
    # float32 [T], the sampler's log-probability of the token; 0 where not sampled.
    logprobs: np.ndarray
    # int32 [T], version of the weights that sampled the token; -1 where not sampled.
    versions: np.ndarray
    # Index of the context that this one continues, less than its own; -1 for a root.
    parent: int = -1
    # Number of tokens of the whole parent that it keeps, counted from the start; 0 for a root.
    kept: int = 0
    # int32 [T], what each place is: 0 outside of documents, n >= 1 in the n-th document of the
    # whole context, -1 for padding (``environment.documents``). None in a run without documents,
    # whose records then do not hold the field.
    documents: np.ndarray | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # Pairs (place, version) in order: keys from this place of the whole context on were computed
    # with this version of the weights. With it a trajectory that several versions sampled can be
    # sampled again. None where one version computed all keys, or computed them again for each
    # token.
    keys: tuple[tuple[int, int], ...] | None = dataclasses.field(
        default=None, metadata=ONLY_WHERE_SET
    )
    # Choices of the sampler's model when it predicted each sampled token, by name: unsigned
    # integers [sampled tokens, ...]. "blocks" [.., layers, key/value heads, picks] are the blocks
    # that layers of NSA attended to; the greatest number of the dtype stands for none. "experts"
    # [.., layers, experts of a token] are those that computed the token before it, the best first.
    # None in a run that notes nothing (``rollout.picks``).
    choices: Mapping[str, np.ndarray] | None = dataclasses.field(
        default=None, metadata=ONLY_WHERE_SET
    )
    # float32 [T], the trainer's log-probability of the token before its update, NaN where it is not
    # known; 0 where not sampled. Only in records of others' runs (``rl_code/foreign/``): ours
    # compute it again.
    trainer_logprobs: np.ndarray | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)


@dataclasses.dataclass(frozen=True)
class Fork:
    """The place at which a trajectory parts from another one of its group.

    Up to there the two have the same tokens, and their workspaces the same files. It is a turn
    border: tools have answered, and the next message is not begun.
    """

    # Index of the other trajectory.
    of: int
    # Messages of the assistant before it, in the first context.
    turn: int
    # Tokens of each context that there was, its own and not what it kept of another one. All later
    # contexts, and tokens of the first context behind its length, are the trajectory's own.
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One finished episode, token in, token out: a tree of contexts.

    A linear episode has one context. ``tokens``, ``sampled``, ``logprobs`` and ``versions`` are
    those of all contexts, one after another, each token of the tree once; of a linear episode they
    are the arrays of its context.
    """

    task_id: str
    # The number of its group, and its own index within the group.
    group: int
    index: int
    # The first one starts with the group's prompt; parents stand before their children.
    contexts: tuple[Context, ...]
    # Number of tokens at the start of the first context that are the same in the whole group.
    prompt_length: int
    turns: tuple[Turn, ...]
    # Way in which it ended: "submitted", "turn_limit", "token_limit", "time_limit" (wall-clock or
    # CPU time of its tools), "agent_ended" (an agent of others that handed nothing in), "fault"
    # (the sandbox's own, which is masked from training).
    status: str
    reward: Reward
    # True if the work was handed in and passed every required test.
    solved: bool = False
    malformed_calls: int = 0
    # True if the first edit alone, graded as it stood, passes the hidden tests. None where that is
    # not known: for an agent without a tool that edits, whose commands may change anything.
    first_edit_passed: bool | None = None
    # Wall-clock time by activity ("tools", "grade").
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # The shares of visible and of hidden tests that the work passes; None where nothing was graded
    # or there are no tests of both kinds. A policy whose shares part learns the visible tests.
    passed: tuple[float, float] | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # For each visible and then each hidden test "" if the work passes it, or what the test said. It
    # is on record where a teacher reads it (``learner.feedback``); None elsewhere, and where
    # nothing was graded.
    test_errors: tuple[str, ...] | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # Number of times that its sandbox was lost and built again; None for never.
    rebuilt: int | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # Scores that an environment of others or a test that is a program (``Script``) gives the work,
    # by name, "reward" among them; None where other tests decide, and where the episode ended
    # before they were given.
    scores: Mapping[str, float] | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # Where it parts from the trajectory that it continues; None for one played from the prompt on.
    fork: Fork | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # True for a demonstration, which no weights sampled: its log-probabilities are 0, as those of a
    # demonstrator who is sure of each token, and its versions are that with which the rest of its
    # group was begun. None for a trajectory of the policy's.
    demonstrated: bool | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)
    # The share of milestones that the work had reached before the first turn of the assistant and
    # after each; None where they were not measured, and of a fault.
    milestones: tuple[float, ...] | None = dataclasses.field(default=None, metadata=ONLY_WHERE_SET)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T], the tokens of all contexts."""
        return self._join("tokens")

    @property
    def sampled(self) -> np.ndarray:
        """bool [T], where the policy chose the token."""
        return self._join("sampled")

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [T], the sampler's log-probabilities; 0 where not sampled."""
        return self._join("logprobs")

    @property
    def versions(self) -> np.ndarray:
        """int32 [T], versions of the weights that sampled the tokens; -1 where not sampled."""
        return self._join("versions")

    @property
    def trainer_logprobs(self) -> np.ndarray | None:
        """float32 [T], the trainer's log-probabilities, NaN where they are not on record; None
        where none is (``Context.trainer_logprobs``).
        """
        found = [context.trainer_logprobs for context in self.contexts]
        if all(own is None for own in found):
            return None
        nothing = [np.full(len(context.tokens), np.nan, np.float32) for context in self.contexts]
        pairs = zip(found, nothing, strict=True)
        return np.concatenate([none if own is None else own for own, none in pairs])

    @property
    def own_sampled(self) -> np.ndarray:
        """bool [T], where the policy chose the token, and not for the trajectory that this one
        continues.
        """
        if self.fork is None:
            return self.sampled
        lengths = dict(enumerate(self.fork.lengths))
        parts = [
            context.sampled & (np.arange(len(context.tokens)) >= lengths.get(number, 0))
            for number, context in enumerate(self.contexts)
        ]
        return np.concatenate(parts)

    @property
    def documents(self) -> np.ndarray | None:
        """int32 [T], what each place is (``Context.documents``); None for none."""
        return None if self.contexts[0].documents is None else self._join("documents")

    @property
    def num_tokens(self) -> int:
        """Tokens of all contexts; padding of documents is not counted."""
        return sum(
            len(context.tokens) - int(np.sum(context.documents == -1))
            if context.documents is not None
            else len(context.tokens)
            for context in self.contexts
        )

    def whole(self, index: int) -> np.ndarray:
        """int32 [...], what the policy saw of context ``index``: kept tokens and its own."""
        return whole_of(self.contexts, [context.tokens for context in self.contexts], index)

    def whole_documents(self, index: int) -> np.ndarray | None:
        """int32 [...], what each place of ``whole(index)`` is; None in a run without documents."""
        own = [context.documents for context in self.contexts if context.documents is not None]
        return whole_of(self.contexts, own, index) if own else None

    def _join(self, name: str) -> np.ndarray:
        parts = [getattr(context, name) for context in self.contexts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def whole_of(contexts: Sequence[Context], own: Sequence[np.ndarray], index: int) -> np.ndarray:
    """Array for the whole of context ``index``, made from the arrays for each context's own tokens.

    own: for each context an array whose first axis is that of the context's own tokens.
    """
    context = contexts[index]
    parts = [own[index]]
    kept = context.kept
    # up the tree, from each ancestor what those below it keep and it did not keep itself
    while context.parent >= 0:
        index = context.parent
        context = contexts[index]
        parts.append(own[index][: max(0, kept - context.kept)])
        kept = min(kept, context.kept)
    return np.concatenate(parts[::-1])


def root_of(contexts: Sequence[Context], index: int) -> int:
    """Index of the context with whose tokens context ``index`` begins: 0 where these are those of
    the group's prompt.
    """
    while contexts[index].parent >= 0 and contexts[index].kept:
        index = contexts[index].parent
    return index


@dataclasses.dataclass(frozen=True)
class Group:
    """G trajectories that answer one task, in order of their index."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    # Trajectories that part in the middle of these (``Trajectory.fork``), in order of their index.
    # They estimate values and are no part of the group's rewards. None in a run without them.
    continuations: tuple[Trajectory, ...] | None = dataclasses.field(
        default=None, metadata=ONLY_WHERE_SET
    )

    @property
    def all(self) -> tuple[Trajectory, ...]:
        """The trajectories and behind them their continuations."""
        return (*self.trajectories, *(self.continuations or ()))

    def parted_from(self, index: int) -> list[tuple[Fork, tuple[Trajectory, ...]]]:
        """The borders of trajectory ``index`` from which others went on, in order, with these."""
        found: dict[Fork, list[Trajectory]] = {}
        for one in self.continuations or ():
            if one.fork is not None and one.fork.of == index:
                found.setdefault(one.fork, []).append(one)
        return [(fork, tuple(found[fork])) for fork in sorted(found, key=lambda fork: fork.turn)]

    @property
    def own(self) -> tuple[Trajectory, ...]:
        """The trajectories of the policy's: all but demonstrations."""
        return tuple(one for one in self.trajectories if not one.demonstrated)

    @property
    def solved(self) -> tuple[int, int]:
        """(episodes of the policy's solved, episodes graded); a fault of the sandbox is not."""
        graded = [one for one in self.own if one.status != "fault"]
        return sum(one.solved for one in graded), len(graded)
