"""One episode: a model and a task take turns until the work is submitted or a limit is reached.

Token in, token out: the prompt and every observation are tokenised once, when they enter. The
tokens that the sampler chose are kept as they came, and never tokenised again. Nothing that the
model does removes an episode from training. A malformed call is answered and counted, and uses up
its turn.
Work that was not submitted never counts as solved.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from models.tokenizer import Tokenizer
from rl_code.environment.asked import Asked
from rl_code.environment.calls import Calls
from rl_code.environment.finished import FinishedEpisode, Grade, Rewarder, Usage
from rl_code.environment.frames import Elsewhere, Frame, Frames, Rewritten, Summarised
from rl_code.environment.grading import grade_in_words, grade_work
from rl_code.environment.messages import read_message
from rl_code.environment.milestones import Milestones
from rl_code.environment.notes import as_read_by
from rl_code.environment.prompts import Encoded
from rl_code.environment.protocols.protocol import Protocol, stop_ids
from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool
from rl_code.environment.sandbox.snapshot import Snapshot, texts
from rl_code.environment.suites.applied import texts_before
from rl_code.environment.summaries import Closing, SummariesConfig, closes
from rl_code.environment.tools.api import offered
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import (
    Context,
    Fork,
    Limits,
    Reward,
    Task,
    ToolResult,
    Trajectory,
    Turn,
)

# Characters that are kept of what a test said.
_MOST_SAID = 400

# Of work that was not handed in.
NOT_GRADED = Grade(submitted=False)


def within(task: Task, limits: Limits) -> Limits:
    """Limits of an episode of a task that may have a time limit of its own (``meta["agent_s"]``),
    which holds where it is less.
    """
    own = task.meta.get("agent_s", limits.tools_s)
    return dataclasses.replace(limits, tools_s=min(own, limits.tools_s))


class Episode(SampledEpisode):
    """An episode in progress: call ``start`` once, ``step`` for each message, and ``finish`` at the
    end; or ``close``, to give it up.

    ``step`` and ``finish`` wait for the sandbox, so they are meant for a worker thread; one thread
    at a time. They never raise because of what the model's code does: that is answered, or counts
    as a failure with its penalties. A fault of the sandbox ends the episode. A bug of a tool
    raises.
    """

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
        reward: Rewarder,
        asked: Asked | None = None,
        prompt: Encoded | None = None,
        on_work: Callable[[Task, int, Snapshot | None], None] | None = None,
        work_pool: SandboxPool | None = None,
    ):
        """work_pool: of the sandbox that the agent works in, where it is another one than for
        grading.
        """
        super().__init__(task, group, index)
        limits = within(task, limits)
        asked = asked or Asked()
        self.protocol = protocol
        self.tools = offered(task, tools)
        self.limits = limits
        # Token ids that end an assistant message.
        self.stop_ids = stop_ids(protocol, tokenizer)
        self.status = ""
        self._name = f"episode {index} of task {task.id}"
        # The prompt, where it is encoded already.
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._pool = pool
        self._reward = reward
        # Called at the end with the task, the index and the files that were handed in, or None.
        self._on_work = on_work
        self._frames = Frames(
            task,
            self.tools,
            protocol=protocol,
            tokenizer=tokenizer,
            limits=limits,
            asked=asked,
        )
        self._asked = asked
        # How the episode ended, while the request at its end is answered.
        self._ended = ""
        new_workspace = functools.partial(
            Workspace, as_read_by(task, index), work_pool or pool, limits, verbose=protocol.verbose
        )
        self._calls = Calls(self._name, self.tools, limits, new_workspace)
        measured = asked.milestones
        self._milestones = Milestones(task, measured, dict(task.files)) if measured else None
        self._potentials: tuple[float, ...] | None = None
        self._malformed_calls = 0
        self._grade_s = 0.0
        # ``Trajectory.test_errors`` of what was graded last.
        self._test_errors: tuple[str, ...] | None = None
        # As ``Trajectory.scores``.
        self._scores: Mapping[str, float] | None = None
        # As ``Trajectory.fork``.
        self._fork: Fork | None = None

    @property
    def _frame(self) -> Frame:
        """The context at work."""
        return self._frames.at_work

    @property
    def _workspace(self) -> Workspace:
        return self._calls.workspace

    @property
    def over(self) -> bool:
        """True if the next call must be finish."""
        return self.status != ""

    @property
    def budget(self) -> int:
        """The most tokens that may be sampled for the next message of the assistant, its stop token
        included; 0 when the episode is over.
        """
        return 0 if self.over else self._frames.budget

    @property
    def documents(self) -> list[int] | None:
        """Document number of each place of the context at work, so far (``Context.documents``);
        None without documents. A message that is being sampled is not yet part of it.
        """
        return self._frame.documents

    def start(self) -> list[int]:
        """Ids of the prompt, padding of documents included, which are the same for every episode of
        a group.

        Raises ValueError when the prompt leaves no room for a message. Such tasks are left out
        before.
        """
        if self._started:
            raise ValueError(f"{self._name} was started twice")
        tokens, kinds = self._prompt or self._frames.prompt(self._frame)
        if len(tokens) >= self._frame.tokens:
            raise ValueError(
                f"task {self.task.id}: prompt of {len(tokens)} tokens leaves no room in "
                f"{self._frame.tokens} tokens of a context, with {self.limits.tokens=}"
            )
        self._frame.transcript.add_given("prompt", tokens, kinds)
        return [*tokens]

    @property
    def _started(self) -> bool:
        return bool(self._frames.first.transcript.turns)

    @property
    def forkable(self) -> bool:
        """True at a turn border of the episode's own context: started, not over, and no sub-agent
        at work.
        """
        return self._started and not self.over and self._frame.asked_by is None

    @property
    def border(self) -> Fork:
        """The place at which an episode that is forked now parts from this one."""
        lengths = tuple(len(frame.transcript) for frame in self._frames.all)
        return Fork(self.index, self._frame.messages, lengths)

    @property
    def at_work(self) -> tuple[int, list[int]]:
        """Index of the context at work, and its tokens so far, without what is being sampled."""
        return self._frame.number, [*self._frame.kept, *self._frame.transcript.tokens]

    @property
    def prompt_length(self) -> int:
        """Tokens of the episode's prompt, once it has started."""
        return self._frames.first.transcript.turns[0].end

    def fork(self, index: int) -> Episode:
        """Another episode of the same group that has come the same way: the same tokens, and a
        workspace with the same files. From here on they are apart. A fork of a fork that has said
        nothing of its own yet parts from the same episode as that one.

        index: its place in the group. Files in /tmp and what was stored outside the workspace are
        not copied. Raises ValueError for an episode that has not started, is over or waits for a
        sub-agent, SnapshotError for files that cannot be copied, and SandboxFault.
        """
        if not self.forkable:
            why = self.status or ("a sub-agent is at work" if self._started else "not started")
            raise ValueError(f"{self._name} cannot be forked: {why}")
        other = copy.copy(self)
        other.index = index
        other._name = f"episode {index} of task {self.task.id}"
        other._calls = self._calls.fork(other._name)
        other._frames = self._frames.copy()
        border = self.border
        if self._fork is None or self._fork.lengths != border.lengths:
            other._fork = border
        other._milestones = self._milestones and self._milestones.copy()
        return other

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> list[int] | Elsewhere | Rewritten | None:
        """Takes one message of the assistant. Returns the ids that follow it, padding of documents
        included; where they stand in another context, since a sub-agent begins or has answered or
        the message was a summary, which one it is; or None when the episode is over. (Only agents
        of others rewrite contexts.)

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
        if frame.summary_due is not None:
            frame.transcript.add_sampled(tokens, logprobs, versions, ())
            return self._go_on_from(frame.summary_due, cut=tokens[-1] not in self.stop_ids)
        self._append_sampled(frame, tokens, logprobs, versions)
        following = self._carry_out()
        if following is None or self._frame is frame:
            return following
        return Elsewhere(self._frame.number, following)

    def _go_on_from(self, due: SummariesConfig | Closing, *, cut: bool) -> Summarised | None:
        """Begins the next context with the last message, a summary, whose calls are not carried
        out. None where the episode is over: there is no room for a message, or this was the one
        that was asked for at its end.
        """
        if isinstance(due, Closing):
            self.status = self._ended
            return None
        whole = self._frames.summarised(due, cut=cut)
        if whole is None:
            self.status = "token_limit"
            return None
        return Summarised(self._frame.number, whole)

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
                return self._close()
            # An observation after which no token could be sampled ends the context. It is left out,
            # so that no trajectory is longer than the limit.
            if not frame.answered and frame.messages < frame.turns and self._frames.samples_left:
                observation = self._frames.follow(frame)
                if observation is not None:
                    return observation
            self._frames.end(frame)
            if frame.asked_by is None:
                self.status = "token_limit"
                return None
            self._frames.return_to(frame.asked_by, frame)

    def _close(self) -> list[int] | None:
        """Asks for a last message where the config wants one; None where the episode ends without
        it.
        """
        if self._asked.closing is not None and closes(self.status):
            asked = self._frames.close(self._asked.closing)
            if asked is not None:
                self._ended, self.status = self.status, ""
                return asked
        self._frames.end_all()
        return None

    def _answered(self, frame: Frame) -> list[int] | None:
        """Carries out the calls of a message of this context, and notes whether the episode is over
        with it. Returns as ``Calls.carry_out``.
        """
        try:
            asked = self._calls.carry_out(self._frames)
            if self._milestones is not None:
                changed = self._calls.take_changed()
                files = self._calls.attempt(self._calls.files_after) if changed else None
                self._milestones.note(files)
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
        first_edit_passed = self._calls.no_edit_passed
        errors = None
        try:
            files = self._calls.files_after()
            self.close()  # nothing the agent left running sees or touches what is graded
            if self._on_work is not None:
                self._on_work(self.task, self.index, files if self.status == "submitted" else None)
            if self.status == "submitted":
                verdict = self._grade(files)
                errors = self._test_errors
                self._scores = self._scores or verdict.scores
            if self.status != "fault" and self._milestones is not None:
                self._potentials = self._milestones.potentials(
                    files, verdict, self._pool, self.limits
                )
            if self.status != "fault":
                first_edit_passed = self._calls.first_edit_passed(files, verdict, self._grade)
        except SandboxFault as fault:
            self._note(fault)
        finally:
            self.close()
        self._grade_s = time.monotonic() - start
        if self.status != "fault":
            # The signals read the trajectory, so it is made before its reward is known.
            flags = Reward(0.0, {}, verdict.flags)
            trajectory = self._trajectory(flags, verdict, first_edit_passed)
            trajectory = dataclasses.replace(trajectory, test_errors=errors)
            try:
                finished = FinishedEpisode(
                    task=self.task,
                    trajectory=trajectory,
                    files_before=texts_before(self.task, self._pool, files),
                    files_after=texts(files),
                    grade=verdict,
                    usage=Usage.of(trajectory),
                    sandboxes=self._pool,
                    limits=self.limits,
                )
                return dataclasses.replace(trajectory, reward=self._reward(finished))
            except SandboxFault as fault:  # of a signal that runs code
                self._note(fault)
        return self._trajectory(Reward(0.0, {}, ("fault",)), NOT_GRADED, self._calls.no_edit_passed)

    def _grade(self, files: Snapshot) -> Grade:
        """Grade of files, as if they were handed in. Raises SandboxFault."""
        if not self._asked.test_errors:
            return grade_work(self.task, files, self._pool, self.limits)
        grade, errors = grade_in_words(self.task, files, self._pool, self.limits)
        self._test_errors = tuple(one_line(error, _MOST_SAID) for error in errors)
        return grade

    def _trajectory(
        self,
        reward: Reward,
        verdict: Grade,
        first_edit_passed: bool | None,
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
            seconds={"tools": self._calls.seconds, "grade": self._grade_s},
            passed=verdict.passed,
            rebuilt=self._calls.rebuilt or None,
            scores=self._scores,
            fork=self._fork,
            milestones=None if self.status == "fault" else self._potentials,
        )

    def _recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...], int]:
        """Contexts and turns of the record, and how many tokens of the prompt the group shares."""
        contexts, turns = self._frames.recorded()
        return contexts, turns, turns[0].end

    def close(self) -> None:
        """Ends every process of the episode. May be called at any time, more than once."""
        self._workspace.close()

    def _check_message(
        self, tokens: list[int], logprobs: list[float], versions: Sequence[int]
    ) -> None:
        if not self._started or self.over:
            raise ValueError(f"{self._name} takes no message: {self.status or 'not started'}")
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
        body = tokens[:-1] if ended else tokens
        calls = read_message(body, frame, self.protocol, self._tokenizer, self.limits)
        frame.transcript.add_sampled(tokens, logprobs, versions, calls)
        self._malformed_calls += sum(call.error != "" for call in calls)
        frame.cut = not ended
        frame.take_calls(calls, self.limits.calls)
