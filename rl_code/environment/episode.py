"""One episode: a model and a task take turns until the work is submitted or a limit is reached.

Token in, token out: the prompt and every observation are tokenised once, when they enter. The
tokens that the sampler chose are kept as they came, and never tokenised again. Nothing that the
model does removes an episode from training. A malformed call is answered and counted, and uses up
its turn.
Work that was not submitted never counts as solved.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from models.tokenizer import Tokenizer
from rl_code.documents import DocumentsConfig
from rl_code.environment.grading import grade_work
from rl_code.environment.parts import answer_parts, encode, prompt_parts
from rl_code.environment.protocols.protocol import Protocol, stop_ids
from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool
from rl_code.environment.sandbox.snapshot import Snapshot, texts
from rl_code.environment.tools.api import PROVOKED, check, execute, offered, repeat
from rl_code.environment.tools.tool import Tool
from rl_code.environment.tools.workspace import Workspace
from rl_code.environment.transcript import Transcript
from rl_code.rewards.combine import ActiveSignal, combine
from rl_code.rewards.finished import FinishedEpisode, Grade, Usage
from rl_code.types import (
    Limits,
    Reward,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

# How often the calls of one message are carried out, where the sandbox is lost each time.
TRIES = 3
# Of work that was not handed in.
NOT_GRADED = Grade(submitted=False)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What an episode says where it goes on in another context, which may keep a beginning of the
    one before.
    """

    # The whole context.
    tokens: list[int]
    # Its index among the contexts of the trajectory.
    context: int


class Episode:
    """An episode in progress: call ``start`` once, ``step`` for each message, and ``finish`` at the
    end; or ``close``, to give it up.

    ``step`` and ``finish`` wait for the sandbox, so they are meant for a worker thread; one thread
    at a time. They never raise because of what the model's code does: that is answered, or counts
    as a failure with its penalties. A fault of the sandbox ends the episode. A bug of a tool
    raises.
    """

    # Whether ``start`` waits for nothing. Otherwise the episodes of a group start in worker
    # threads.
    starts_at_once = True

    def __init__(
        self,
        task: Task,
        *,
        group: int,
        index: int,
        protocol: Protocol,
        tools: Mapping[str, Tool],
        tokenizer: Tokenizer,
        pool: SandboxPool,
        limits: Limits,
        reward: Sequence[ActiveSignal],
        documents: DocumentsConfig | None = None,
        on_work: Callable[[Task, int, Snapshot | None], None] | None = None,
    ):
        self.task = task
        self.group = group
        self.index = index
        self.protocol = protocol
        self.tools = offered(task, tools)
        self.limits = limits
        # Token ids that end an assistant message.
        self.stop_ids = stop_ids(protocol, tokenizer)
        self.status = ""
        self._name = f"episode {index} of task {task.id}"
        self._tokenizer = tokenizer
        self._pool = pool
        self._reward = reward
        self._workspace = Workspace(task, pool, limits, verbose=protocol.verbose)
        self._documents = documents
        # Called at the end with the task, the index and the files that were handed in, or None.
        self._on_work = on_work
        self._transcript = Transcript(tokenizer, None if documents is None else [])
        self._messages = 0
        self._malformed_calls = 0
        self._first_edit: Snapshot | None = None
        self._first_edit_stands = False  # whether nothing was changed after it
        self._first_edit_failed = False  # whether a visible test is known to fail on it
        self._rebuilt = 0  # how often a lost sandbox was built again
        self._seconds = {"tools": 0.0, "grade": 0.0}

    @property
    def over(self) -> bool:
        """Whether the next call must be finish."""
        return self.status != ""

    @property
    def budget(self) -> int:
        """The most tokens that may be sampled for the next message of the assistant, its stop token
        included; 0 when the episode is over.
        """
        if self.over:
            return 0
        return min(self.limits.turn_tokens, self.limits.tokens - len(self._transcript))

    @property
    def documents(self) -> list[int] | None:
        """What each place of the context so far is (``Context.documents``); None without
        documents. A message that is being sampled is not yet part of it.
        """
        return self._transcript.documents

    def start(self) -> list[int]:
        """Ids of the prompt, padding of documents included, which are the same for every episode of
        a group.

        Raises ValueError when the prompt leaves no room for a message. Such tasks are left out
        before.
        """
        if self._transcript.turns:
            raise ValueError(f"{self._name} was started twice")
        parts = prompt_parts(self.protocol, self.task, self.tools, self._documents)
        tokens, kinds = encode(parts, self._tokenizer, self._documents)
        if len(tokens) >= self.limits.tokens:
            raise ValueError(
                f"task {self.task.id}: prompt of {len(tokens)} tokens leaves no room in "
                f"{self.limits.tokens=}"
            )
        self._transcript.add_given("prompt", tokens, kinds)
        return tokens

    def share(self, length: int) -> None:
        """Told after the start: how many first tokens of the prompt the whole group has. Here it
        is all of them.
        """

    def sampling(self, tokens: Sequence[int]) -> None:
        """Told while a message is sampled: its tokens so far."""

    def fork(self, index: int) -> Episode:
        """Another episode of the same group that has come the same way: the same tokens, and a
        workspace with the same files. From here on they are apart.

        index: its place in the group. Files in /tmp and what was stored outside the workspace are
        not copied. Raises ValueError for an episode that has not started or is over, SnapshotError
        for files that cannot be copied, and SandboxFault.
        """
        if self.over or not self._transcript.turns:
            raise ValueError(f"{self._name} cannot be forked: {self.status or 'not started'}")
        other = copy.copy(self)
        other.index = index
        other._name = f"episode {index} of task {self.task.id}"
        other._workspace = self._workspace.fork()
        other._transcript = self._transcript.copy()
        other._seconds = dict(self._seconds)
        return other

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> list[int] | Rewritten | None:
        """Takes one message of the assistant. Returns the ids that follow it, padding of documents
        included, or None when the episode is over. (Only agents of others rewrite contexts.)

        Args:
          tokens: the sampled tokens. The last is a stop token, unless the budget or the protocol's
            rule on text ended the message.
          logprobs: the sampler's log-probability of each token.
          versions: the version of the weights that sampled each token.

        Raises ValueError for a message that the sampler must not produce: an empty one, one that is
        too long, or one that goes on after its end.
        """
        tokens = [int(token) for token in tokens]
        logprobs = [float(logprob) for logprob in logprobs]
        self._check_message(tokens, logprobs, versions)
        calls = self._append_sampled(tokens, logprobs, versions)
        results = self._carry_out(calls)
        observation: list[int] = []
        kinds: list[int] | None = None
        if not self.over:
            cut = tokens[-1] not in self.stop_ids
            observation, kinds = self._observation(results, cut=cut)
        # An observation after which no token could be sampled ends the episode. It is left out, so
        # that no trajectory is longer than the limit.
        if not self.over and len(self._transcript) + len(observation) >= self.limits.tokens:
            self.status = "token_limit"
        if self.over:
            observation = []
            kinds = None
        self._transcript.add_given("tool", observation, kinds, tuple(results))
        return None if self.over else observation

    def _carry_out(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Carries out the calls of a message, and notes whether the episode is over with it."""
        try:
            results = self._try_calls(calls)
        except SandboxFault as fault:
            self._note(fault)
            results = [ToolResult("", f"sandbox fault: {fault}", ok=False)]
        self._messages += 1
        # The order decides how the episode ended if several things are true at once: work that was
        # handed in counts, even if it used up the last turn or the time.
        if self._workspace.handed_in is not None:
            self.status = "submitted"
        elif not self.over and self._workspace.out_of_time:
            self.status = "time_limit"
        elif not self.over and self._messages == self.limits.turns:
            self.status = "turn_limit"
        return results

    def _note(self, fault: SandboxFault) -> None:
        """The episode is over, through no fault of the policy's."""
        self.status = "fault"
        logging.warning("%s ended in a fault of the sandbox: %s", self._name, fault)

    def finish(self) -> Trajectory:
        """Grades what was submitted, in a fresh sandbox, and returns the trajectory. Raises
        ValueError if the episode is not over.
        """
        if not self.over:
            raise ValueError(f"{self._name} is not over")
        start = time.monotonic()
        files: Snapshot = {}
        verdict = NOT_GRADED
        first_edit_passed = False
        try:
            files = self._files_after()
            self.close()  # nothing the agent left running sees or touches what is graded
            if self._on_work is not None:
                self._on_work(self.task, self.index, files if self.status == "submitted" else None)
            if self.status == "submitted":
                verdict = self._grade(files)
            first_edit_passed = self._first_edit_passed(files, verdict)
        except SandboxFault as fault:
            self._note(fault)
        finally:
            self.close()
        self._seconds["grade"] = time.monotonic() - start
        if self.status == "fault":
            return self._trajectory(Reward(0.0, {}, ("fault",)))
        # The signals read the trajectory, so it is made before its reward is known.
        trajectory = self._trajectory(
            Reward(0.0, {}, verdict.flags),
            verdict=verdict,
            first_edit_passed=first_edit_passed,
        )
        finished = FinishedEpisode(
            task=self.task,
            trajectory=trajectory,
            files_before=self.task.files,
            files_after=texts(files),
            grade=verdict,
            usage=Usage.of(trajectory),
        )
        return dataclasses.replace(trajectory, reward=combine(finished, self._reward))

    def _trajectory(
        self,
        reward: Reward,
        *,
        verdict: Grade = NOT_GRADED,
        first_edit_passed: bool = False,
    ) -> Trajectory:
        """The record of the episode."""
        return Trajectory(
            task_id=self.task.id,
            group=self.group,
            index=self.index,
            contexts=(self._transcript.context(),),
            prompt_length=self._transcript.turns[0].end,
            turns=tuple(self._transcript.turns),
            status=self.status,
            reward=reward,
            solved=verdict.solved,
            malformed_calls=self._malformed_calls,
            first_edit_passed=first_edit_passed,
            seconds=dict(self._seconds),
            passed=verdict.passed,
            rebuilt=self._rebuilt or None,
        )

    def close(self) -> None:
        """Ends every process of the episode. May be called at any time, more than once."""
        self._workspace.close()

    def _check_message(
        self, tokens: list[int], logprobs: list[float], versions: Sequence[int]
    ) -> None:
        if not self._transcript.turns or self.over:
            raise ValueError(
                f"episode {self.index} of task {self.task.id} takes no message: "
                f"{self.status or 'not started'}"
            )
        if not 0 < len(tokens) <= self.budget or not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(tokens)=} must be in [1, {self.budget}] and equal {len(logprobs)=} and "
                f"{len(versions)=}"
            )
        if any(token in self.stop_ids for token in tokens[:-1]):
            raise ValueError(
                f"a stop token {set(self.stop_ids)} stands inside the message {tokens}"
            )

    def _append_sampled(
        self, tokens: list[int], logprobs: list[float], versions: Sequence[int]
    ) -> list[ToolCall]:
        """Records a message; returns its calls, those that cannot be carried out with their
        error.
        """
        ended = tokens[-1] in self.stop_ids
        body = self._tokenizer.decode(tokens[:-1] if ended else tokens)
        if self._messages == 0:
            body = self.task.prefill + body
        calls = [
            self._checked(call, number) for number, call in enumerate(self._parse(body), start=1)
        ]
        self._transcript.add_sampled(tokens, logprobs, versions, tuple(calls))
        self._malformed_calls += sum(call.error != "" for call in calls)
        return calls

    def _parse(self, body: str) -> list[ToolCall]:
        """The calls of a message; one malformed call for a text that is nested or large without
        end.
        """
        try:
            return self.protocol.parse(body, self.task, self.tools)
        except (RecursionError, MemoryError) as error:
            return [ToolCall("", {}, f"the message cannot be read: {type(error).__name__}")]

    def _checked(self, call: ToolCall, number: int) -> ToolCall:
        """The call, the ``number``-th of its message, with its error if it cannot be carried out.

        The arguments of a call with an error are left out. Nobody has checked how deeply the model
        nested them, and the turn's text still shows them.
        """
        if number > self.limits.calls:
            error = f"call {number} of a message that may hold {self.limits.calls}"
        else:
            error = check(call, self.tools)
        return ToolCall(call.name, {} if error else call.arguments, error)

    def _try_calls(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of a message's calls, in order. Raises SandboxFault.

        If the sandbox is lost meanwhile, the calls are carried out again in another one, which is
        brought to where the lost one was. Whether the machine or the agent's code lost it cannot be
        known. The machine's accidents then cost no reward. Code that brings its sandbox down does
        so again, and what it gets is that of the last try: a failure.
        """
        # Tools get what is left of the episode's time. The time in which the sampler writes a
        # message is not counted, nor are tries that were lost.
        left_s = self.limits.episode_s - self._seconds["tools"]
        noted = self._first_edit, self._first_edit_stands, self._first_edit_failed
        # In a sandbox that the messages before have brought down, all that follows fails.
        for tries_left in reversed(range(1 if self._workspace.lost else TRIES)):
            start = time.monotonic()
            self._workspace.deadline = start + left_s
            try:
                results = self._execute(calls)
                if not self._workspace.lost or not tries_left:
                    self._seconds["tools"] += time.monotonic() - start
                    return results
            except SandboxFault:
                if not tries_left:
                    raise
            logging.warning("%s lost its sandbox: it is built again", self._name)
            self._rebuilt += 1
            self._first_edit, self._first_edit_stands, self._first_edit_failed = noted
            self._rebuild()
        raise AssertionError("unreachable")

    def _turns_so_far(self) -> Sequence[Turn]:
        """All turns, the message that is carried out included."""
        return self._transcript.turns

    def _rebuild(self) -> None:
        """Another workspace in place of a lost one, in which all messages before the last are
        carried out again. Where that fails, the next call meets a sandbox that is lost.
        """
        self._workspace.close()
        self._workspace = Workspace(
            self.task, self._pool, self.limits, verbose=self.protocol.verbose
        )
        # The messages before took no longer than an episode may.
        self._workspace.deadline = time.monotonic() + self.limits.episode_s
        *before, _ = (turn for turn in self._turns_so_far() if turn.role == "assistant")
        with contextlib.suppress(SandboxFault):
            repeat(before, self.tools, self._workspace)

    def _execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Carries out the calls and returns their results in order. Calls after a submit are not
        carried out. One result stands for all calls beyond the limit. Raises SandboxFault.
        """
        results = []
        most = self.limits.calls
        for call in calls[:most]:
            if call.error:
                results.append(ToolResult(call.name, call.error, ok=False))
                continue
            if self._workspace.out_of_time:
                results.append(ToolResult(call.name, "the time is used up", ok=False))
                continue
            self._workspace.tests_failed = None
            results.append(execute(call, self.tools, self._workspace))
            self._note_edit(self.tools[call.name], ok=results[-1].ok)
            if self._workspace.handed_in is not None:
                return results
        if len(calls) > most:
            told = f"only the first {most} calls of a message are carried out, not {len(calls)}"
            results.append(ToolResult("", told, ok=False))
        return results

    def _note_edit(self, tool: Tool, *, ok: bool) -> None:
        """Keeps the files after the first edit, and what is known about them since."""
        if tool.edits and ok and self._first_edit is None:
            try:
                self._first_edit = self._workspace.snapshot()
            except PROVOKED:  # files that cannot be read in full are not graded
                self._first_edit = {}
                self._first_edit_failed = True
            self._first_edit_stands = True
        elif tool.edits or tool.runs_commands:
            self._first_edit_stands = False
        # A visible test that fails while nothing was changed since the first edit shows that this
        # edit fails, so it need not be graded on its own.
        elif self._workspace.tests_failed is not None and self._first_edit_stands:
            self._first_edit_failed = self._workspace.tests_failed

    def _observation(
        self, results: Sequence[ToolResult], *, cut: bool
    ) -> tuple[list[int], list[int] | None]:
        """Ids of the answer, and what each place is; a message that was cut is closed first, by a
        stop token that nobody sampled.
        """
        closing = self.protocol.stop_tokens[0] if cut else ""
        parts = answer_parts(self.protocol, results, self.tools, self._documents)
        number = max(self.documents or [0])
        return encode(
            [(closing, False), *parts],
            self._tokenizer,
            self._documents,
            at=len(self._transcript),
            number=number,
        )

    def _first_edit_passed(self, final: Snapshot, verdict: Grade) -> bool:
        """Whether the first edit alone passes every test. Raises SandboxFault.

        final: the files at the end. verdict: what the tests made of them.
        """
        if self._first_edit is None or self._first_edit_failed or self.status == "fault":
            return False
        if verdict.submitted and self._first_edit == final:
            return verdict.solved  # the same files were graded already
        return self._grade(self._first_edit).solved

    def _files_after(self) -> Snapshot:
        """The files as they were handed in, or as they stand. Raises SandboxFault."""
        if self._workspace.handed_in is not None:
            return self._workspace.handed_in
        try:
            return self._workspace.snapshot()
        except PROVOKED as error:  # not handed in, so nothing is graded
            logging.info("%s left files that cannot be read in full: %s", self._name, error)
            return {}

    def _grade(self, files: Snapshot) -> Grade:
        """What the tests make of these files. Raises SandboxFault."""
        return grade_work(self.task, files, self._pool, self.limits)
