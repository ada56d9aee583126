"""One episode: a model and a task take turns until the work is submitted or a limit is reached.

Token in, token out: the prompt and every observation are tokenised once, when they enter. The
tokens that the sampler chose are kept as they came, and never tokenised again. Nothing that the
model does removes an episode from training. A malformed call is answered and counted, and uses up
its turn.
Work that was not submitted never counts as solved.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from models.tokenizer import Tokenizer
from rl_code.documents import DocumentsConfig
from rl_code.environment.frames import Elsewhere, Frame, Rewritten, own_frame
from rl_code.environment.grading import grade_work
from rl_code.environment.parts import answer_parts, encode, prompt_parts
from rl_code.environment.protocols.protocol import Protocol, break_up, stop_ids
from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool
from rl_code.environment.sandbox.snapshot import Snapshot, texts
from rl_code.environment.tools.api import PROVOKED, check, execute, offered
from rl_code.environment.tools.sub_agent import answer_of
from rl_code.environment.tools.tool import Delegation, Tool
from rl_code.environment.tools.workspace import Workspace
from rl_code.environment.transcript import Transcript
from rl_code.rewards.combine import ActiveSignal, combine
from rl_code.rewards.finished import FinishedEpisode, Grade, Usage
from rl_code.types import (
    Context,
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
        # All contexts so far, and the one at work.
        own = own_frame(task, self.tools, self._new_transcript(), limits)
        self._frames = [own]
        self._frame = own
        self._malformed_calls = 0
        self._first_edit: Snapshot | None = None
        self._first_edit_stands = False  # whether nothing was changed after it
        self._first_edit_failed = False  # whether a visible test is known to fail on it
        # Calls that were carried out, in order, to bring another workspace to the same state.
        self._done: list[ToolCall] = []
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
        return min(self.limits.turn_tokens, self._places_left(self._frame), self._samples_left)

    def _places_left(self, frame: Frame) -> int:
        """How many tokens a context may still hold. Those of all contexts count to the
        episode's.
        """
        places = sum(len(one.transcript) for one in self._frames)
        return min(frame.tokens - len(frame.transcript), self.limits.tokens - places)

    @property
    def _samples_left(self) -> int:
        """How many tokens may still be sampled in all contexts together, which batches have room
        for (``derive.sampled_tokens``). A single context never gets there.
        """
        sampled = sum(one.transcript.sampled for one in self._frames)
        return self.limits.turns * self.limits.turn_tokens - sampled

    def _new_transcript(self) -> Transcript:
        return Transcript(self._tokenizer, None if self._documents is None else [])

    @property
    def documents(self) -> list[int] | None:
        """What each place of the context at work is so far (``Context.documents``); None without
        documents. A message that is being sampled is not yet part of it.
        """
        return self._frame.transcript.documents

    def start(self) -> list[int]:
        """Ids of the prompt, padding of documents included, which are the same for every episode of
        a group.

        Raises ValueError when the prompt leaves no room for a message. Such tasks are left out
        before.
        """
        if self._started:
            raise ValueError(f"{self._name} was started twice")
        parts = prompt_parts(self.protocol, self.task, self.tools, self._documents)
        tokens, kinds = encode(parts, self._tokenizer, self._documents)
        if len(tokens) >= self.limits.tokens:
            raise ValueError(
                f"task {self.task.id}: prompt of {len(tokens)} tokens leaves no room in "
                f"{self.limits.tokens=}"
            )
        self._frame.transcript.add_given("prompt", tokens, kinds)
        return tokens

    def share(self, length: int) -> None:
        """Told after the start: how many first tokens of the prompt the whole group has. Here it
        is all of them.
        """

    def sampling(self, tokens: Sequence[int]) -> None:
        """Told while a message is sampled: its tokens so far."""

    @property
    def _started(self) -> bool:
        return bool(self._frames[0].transcript.turns)

    def fork(self, index: int) -> Episode:
        """Another episode of the same group that has come the same way: the same tokens, and a
        workspace with the same files. From here on they are apart.

        index: its place in the group. Files in /tmp and what was stored outside the workspace are
        not copied. Raises ValueError for an episode that has not started, is over or waits for a
        sub-agent, SnapshotError for files that cannot be copied, and SandboxFault.
        """
        if self.over or not self._started or self._frame.number:
            why = self.status or ("a sub-agent is at work" if self._started else "not started")
            raise ValueError(f"{self._name} cannot be forked: {why}")
        other = copy.copy(self)
        other.index = index
        other._name = f"episode {index} of task {self.task.id}"
        other._workspace = self._workspace.fork()
        other._frames = [frame.copy() for frame in self._frames]
        other._frame = other._frames[0]
        other._seconds = dict(self._seconds)
        other._done = list(self._done)
        return other

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> list[int] | Elsewhere | Rewritten | None:
        """Takes one message of the assistant. Returns the ids that follow it, padding of documents
        included; where they stand in another context, since a sub-agent begins or has answered,
        which one it is; or None when the episode is over. (Only agents of others rewrite contexts.)

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
        frame = self._frame
        self._append_sampled(frame, tokens, logprobs, versions)
        following = self._carry_out()
        if following is None or self._frame is frame:
            return following
        return Elsewhere(self._frame.number, following)

    def _carry_out(self) -> list[int] | None:
        """Carries out the calls of the last message, and goes on with the context that asked for it
        where a sub-agent is done. What follows in the context that is then at work; None when the
        episode is over.
        """
        while True:
            frame = self._frame
            asked = self._answered(frame)
            if asked is not None:
                return asked
            if self.over:
                # so the results of contexts that wait are on record, too
                while frame is not None:
                    frame.transcript.add_given("tool", [], *self._nothing(), tuple(frame.results))
                    frame = frame.asked_by
                return None
            results = tuple(frame.results)
            # An observation after which no token could be sampled ends the context. It is left out,
            # so that no trajectory is longer than the limit.
            if not frame.answered and frame.messages < frame.turns and self._samples_left:
                observation, kinds = self._observation(frame)
                if len(observation) < self._places_left(frame):
                    frame.transcript.add_given("tool", observation, kinds, results)
                    return observation
            frame.transcript.add_given("tool", [], *self._nothing(), results)
            if frame.asked_by is None:
                self.status = "token_limit"
                return None
            self._return_to(frame.asked_by, frame)

    def _answered(self, frame: Frame) -> list[int] | None:
        """Carries out the calls of a message of this context, and notes whether the episode is over
        with it. Returns as ``_execute``.
        """
        try:
            asked = self._try_calls(frame)
        except SandboxFault as fault:
            self._note(fault)
            frame.results = [ToolResult("", f"sandbox fault: {fault}", ok=False)]
            return None
        if asked is not None:
            return asked
        # The order decides how the episode ended if several things are true at once: work that was
        # handed in counts, even if it used up the last turn or the time.
        if self._workspace.handed_in is not None:
            self.status = "submitted"
        elif not self.over and self._workspace.out_of_time:
            self.status = "time_limit"
        elif not self.over and frame.asked_by is None and frame.messages == frame.turns:
            self.status = "turn_limit"
        return None

    def _nothing(self) -> tuple[list[int] | None]:
        """What the places of an empty text are."""
        return (None if self._documents is None else [],)

    def _delegate(self, frame: Frame, call: ToolCall, allowed: Delegation) -> list[int] | None:
        """Begins the context of a sub-agent, and returns its prompt; None, with a result, where
        there is no room for one.
        """
        question = {"role": "user", "content": break_up(call.arguments["question"])}
        task = dataclasses.replace(self.task, messages=(question,), prefill="")
        tools = {
            name: tool
            for name, tool in frame.tools.items()
            if tool.delegation is None and name != "submit"
        }
        child = Frame(
            number=len(self._frames),
            task=task,
            tools=tools,
            transcript=self._new_transcript(),
            turns=allowed.turns,
            tokens=min(allowed.tokens, self.limits.tokens),
            asked_by=frame,
            called=call.name,
        )
        parts = prompt_parts(self.protocol, task, tools, self._documents)
        tokens, kinds = encode(parts, self._tokenizer, self._documents)
        if len(tokens) >= self._places_left(child) or not self._samples_left:
            frame.results.append(ToolResult(call.name, "no tokens are left for it", ok=False))
            return None
        child.transcript.add_given("prompt", tokens, kinds)
        self._frames.append(child)
        self._frame = child
        return tokens

    def _return_to(self, frame: Frame, child: Frame) -> None:
        """Goes on with the context that asked a sub-agent, with its last message as the result."""
        said = answer_of(child.said, verbose=self.protocol.verbose)
        frame.results.append(ToolResult(child.called, said, ok=child.answered))
        self._frame = frame

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
            sandboxes=self._pool,
        )
        try:
            return dataclasses.replace(trajectory, reward=combine(finished, self._reward))
        except SandboxFault as fault:  # of a signal that runs code
            self._note(fault)
            return self._trajectory(Reward(0.0, {}, ("fault",)))

    def _trajectory(
        self,
        reward: Reward,
        *,
        verdict: Grade = NOT_GRADED,
        first_edit_passed: bool = False,
    ) -> Trajectory:
        """The record of the episode."""
        contexts, turns, prompt_length = self._recorded()
        return Trajectory(
            task_id=self.task.id,
            group=self.group,
            index=self.index,
            contexts=contexts,
            prompt_length=prompt_length,
            turns=turns,
            status=self.status,
            reward=reward,
            solved=verdict.solved,
            malformed_calls=self._malformed_calls,
            first_edit_passed=first_edit_passed,
            seconds=dict(self._seconds),
            passed=verdict.passed,
            rebuilt=self._rebuilt or None,
        )

    def _recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...], int]:
        """Contexts and turns of the record, and how many tokens of the prompt the group shares."""
        turns = tuple(
            turn if frame.number == 0 else dataclasses.replace(turn, context=frame.number)
            for frame in self._frames
            for turn in frame.transcript.turns
        )
        contexts = tuple(frame.transcript.context() for frame in self._frames)
        return contexts, turns, turns[0].end

    def close(self) -> None:
        """Ends every process of the episode. May be called at any time, more than once."""
        self._workspace.close()

    def _check_message(
        self, tokens: list[int], logprobs: list[float], versions: Sequence[int]
    ) -> None:
        if not self._started or self.over:
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
        self,
        frame: Frame,
        tokens: list[int],
        logprobs: list[float],
        versions: Sequence[int],
    ) -> None:
        """Records a message with its calls, those that cannot be carried out with their error."""
        ended = tokens[-1] in self.stop_ids
        body = self._tokenizer.decode(tokens[:-1] if ended else tokens)
        if frame.messages == 0:
            body = frame.task.prefill + body
        frame.said = body
        frame.answered = frame.asked_by is not None and not self.protocol.has_call(body)
        parsed = [] if frame.answered else self._parse(body, frame)
        calls = [self._checked(call, number, frame) for number, call in enumerate(parsed, start=1)]
        frame.transcript.add_sampled(tokens, logprobs, versions, tuple(calls))
        self._malformed_calls += sum(call.error != "" for call in calls)
        frame.cut = not ended
        self._take_calls(frame, calls)

    def _take_calls(self, frame: Frame, calls: Sequence[ToolCall]) -> None:
        """A message of this context has asked for these calls."""
        frame.messages += 1
        frame.results = []
        frame.pending = collections.deque(calls[: self.limits.calls])
        frame.beyond = len(calls) - len(frame.pending)

    def _parse(self, body: str, frame: Frame) -> list[ToolCall]:
        """The calls of a message; one malformed call for a text that is nested or large without
        end.
        """
        try:
            return self.protocol.parse(body, frame.task, frame.tools)
        except (RecursionError, MemoryError) as error:
            return [ToolCall("", {}, f"the message cannot be read: {type(error).__name__}")]

    def _checked(self, call: ToolCall, number: int, frame: Frame) -> ToolCall:
        """The call, the ``number``-th of its message, with its error if it cannot be carried out.

        The arguments of a call with an error are left out. Nobody has checked how deeply the model
        nested them, and the turn's text still shows them.
        """
        if number > self.limits.calls:
            error = f"call {number} of a message that may hold {self.limits.calls}"
        else:
            error = check(call, frame.tools)
        return ToolCall(call.name, {} if error else call.arguments, error)

    def _try_calls(self, frame: Frame) -> list[int] | None:
        """Carries out the calls of a message that are still to come, as ``_execute``. Raises
        SandboxFault.

        If the sandbox is lost meanwhile, they are carried out again in another one, which is
        brought to where the lost one was. Whether the machine or the agent's code lost it cannot be
        known. The machine's accidents then cost no reward. Code that brings its sandbox down does
        so again, and what it gets is that of the last try: a failure.
        """
        # Tools get what is left of the episode's time, all tries together: no sandbox that is lost
        # over and over may hold up a run. The time in which the sampler writes a message is not
        # counted, and of several tries the last one is.
        end = time.monotonic() + self.limits.episode_s - self._seconds["tools"]
        noted = self._first_edit, self._first_edit_stands, self._first_edit_failed
        pending = tuple(frame.pending)
        so_far = len(frame.results), len(self._frames), len(self._done)
        # In a sandbox that the messages before have brought down, all that follows fails.
        for tries_left in reversed(range(1 if self._workspace.lost else TRIES)):
            start = time.monotonic()
            self._workspace.deadline = end
            try:
                asked = self._execute(frame)
                if not self._workspace.lost or not tries_left:
                    self._seconds["tools"] += time.monotonic() - start
                    return asked
            except SandboxFault:
                if not tries_left:
                    raise
            logging.warning("%s lost its sandbox: it is built again", self._name)
            self._rebuilt += 1
            self._first_edit, self._first_edit_stands, self._first_edit_failed = noted
            frame.pending = collections.deque(pending)
            self._frame = frame
            for each, length in zip((frame.results, self._frames, self._done), so_far, strict=True):
                del each[length:]
            self._rebuild(end)
        raise AssertionError("unreachable")

    def _rebuild(self, end: float) -> None:
        """Another workspace in place of a lost one, in which all calls before are carried out
        again, until ``end`` at most. Where that fails, the next call meets a sandbox that is lost.
        """
        self._workspace.close()
        self._workspace = Workspace(
            self.task, self._pool, self.limits, verbose=self.protocol.verbose
        )
        self._workspace.deadline = end
        with contextlib.suppress(SandboxFault):
            for call in self._done:
                if not self._workspace.out_of_time:
                    execute(call, self.tools, self._workspace)

    def _execute(self, frame: Frame) -> list[int] | None:
        """Carries out the calls of a message; their results are in ``frame.results``, in order.
        Calls after a submit are not carried out. One result stands for all calls beyond the limit.

        Returns None, or the prompt of a sub-agent where a call asks one. The calls behind it are
        carried out when it has answered. Raises SandboxFault.
        """
        while frame.pending:
            call = frame.pending.popleft()
            if call.error:
                frame.results.append(ToolResult(call.name, call.error, ok=False))
                continue
            if self._workspace.out_of_time:
                frame.results.append(ToolResult(call.name, "the time is used up", ok=False))
                continue
            if (allowed := frame.tools[call.name].delegation) is not None:
                if (prompt := self._delegate(frame, call, allowed)) is not None:
                    return prompt
                continue
            self._workspace.tests_failed = None
            self._done.append(call)
            result = execute(call, frame.tools, self._workspace)
            frame.results.append(result)
            self._note_edit(frame.tools[call.name], ok=result.ok)
            if self._workspace.handed_in is not None:
                return None
        if frame.beyond:
            most = self.limits.calls
            told = (
                f"only the first {most} calls of a message are carried out, not "
                f"{most + frame.beyond}"
            )
            frame.results.append(ToolResult("", told, ok=False))
        return None

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

    def _observation(self, frame: Frame) -> tuple[list[int], list[int] | None]:
        """Ids of the answer to a message, and what each place is; a message that was cut is closed
        first, by a stop token that nobody sampled.
        """
        closing = self.protocol.stop_tokens[0] if frame.cut else ""
        parts = answer_parts(self.protocol, frame.results, self.tools, self._documents)
        number = max(frame.transcript.documents or [0])
        return encode(
            [(closing, False), *parts],
            self._tokenizer,
            self._documents,
            at=len(frame.transcript),
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
