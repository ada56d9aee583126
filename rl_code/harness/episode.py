"""An episode of somebody else's agent: its program asks for messages, the policy samples them.

To what drives it, it is an episode like any other (``environment.episode``): ``start`` gives the
prompt, ``step`` takes a message and gives what follows, ``finish`` grades the workspace. In between
the agent's program decides what to ask, in which words and how often. What it does with its history
makes a tree of contexts (``endpoint.session``).

Departures from episodes of our own: calls of tools are the agent's business, so those that no agent
could read are all that counts as malformed; the first edit is not graded apart; and sampling
settings of a request (temperature, top_p, seed) have no effect, since the policy samples as the run
says.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from models.tokenizer import Tokenizer
from rl_code.environment.episode import Episode
from rl_code.environment.finished import Grade, Rewarder
from rl_code.environment.frames import Rewritten
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool
from rl_code.environment.sandbox.snapshot import Snapshot
from rl_code.environment.tools.api import PROVOKED
from rl_code.environment.tools.workspace import Workspace
from rl_code.harness.agent import Ending, EpisodeFacts, HarnessError
from rl_code.harness.endpoint.answers import Accepted, Answer, Pending
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.fields import ApiError, refuse, unknown_model
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.harness.endpoint.session import Session, Step
from rl_code.harness.endpoint.stops import stopping
from rl_code.harness.harness import Harness
from rl_code.types import Context, Limits, Task, Trajectory, Turn

# Characters of a command's output that an agent gets; it may show its model less.
_WIDTH = 100_000
# What it gets for a command that could not be run, but for the error.
_FAILED = {"output": "", "returncode": -1, "timed_out": False}


class AgentClient:
    """The endpoint's side of an episode: takes requests and commands, in the server's threads."""

    def __init__(self, text: ChatText, model: str, run: Callable[..., dict[str, Any]]):
        self.text, self._model = text, model
        self._run = run
        # Requests with the ids of their answers, the program's ending, or a fault of the sandbox.
        self.events: queue.Queue[tuple[Pending, str] | Ending | SandboxFault] = queue.Queue()
        self._over = threading.Event()

    def models(self) -> list[str]:
        """As ``endpoint.endpoint.Client.models``."""
        return [self._model]

    def ask(self, pending: Pending, session: str) -> Accepted:
        """As ``endpoint.endpoint.Client.ask``."""
        request = pending.request
        if request.model not in ("", self._model):
            raise unknown_model(request.model, self.models())
        if not isinstance(request, ChatRequest):
            raise ApiError("an episode answers chats only", status=404)
        if request.n != 1:
            raise refuse("n", f"{request.n} is not supported, only 1", "unsupported_value")
        asked = dict(
            response_format=request.json_schema,
            tool_choice=request.forced,
            top_logprobs=request.alternatives,
            logit_bias=request.logit_bias,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
        )
        for name in (name for name, value in asked.items() if value):
            raise refuse(name, "an episode samples as the run says", "unsupported_value")
        if self._over.is_set():
            raise over()
        id = f"chatcmpl-{uuid.uuid4().hex}"
        self.events.put((pending, id))
        if self._over.is_set():
            self.refuse()  # ``end`` may have missed it
        return Accepted(id, self._model)

    def execute(self, command: str, timeout_s: float | None) -> dict[str, Any]:
        """As ``endpoint.endpoint.Client.execute``."""
        if self._over.is_set():
            raise over()
        return self._run(command, timeout_s)

    def end(self) -> None:
        """Refuses what waits and what comes from now on, and wakes who waits for it."""
        self._over.set()
        self.refuse()
        self.events.put(Ending(False, "the episode was given up"))

    def refuse(self) -> None:
        """Refuses what waits."""
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, tuple):
                event[0].fail(over())


def over() -> ApiError:
    """Error for an agent that goes on after its episode's end. Not a kind that clients retry."""
    return ApiError("the episode is over", status=403, kind="permission_error", code="episode_over")


def too_long(why: str) -> ApiError:
    """Error for an agent that asks for more than there is room for."""
    message = f"the context length is exceeded: {why}"
    return ApiError(message, code="context_length_exceeded", param="messages")


class AgentEpisode(Episode):
    """An episode in progress, as ``Episode``. It cannot be forked."""

    starts_at_once = False

    def __init__(
        self,
        task: Task,
        *,
        group: int,
        index: int,
        protocol: Protocol,
        tokenizer: Tokenizer,
        pool: SandboxPool,
        limits: Limits,
        reward: Rewarder,
        harness: Harness,
        on_work: Callable[[Task, int, Snapshot | None], None] | None = None,
    ):
        super().__init__(
            task,
            group=group,
            index=index,
            protocol=protocol,
            tools={},
            tokenizer=tokenizer,
            pool=pool,
            limits=limits,
            reward=reward,
            on_work=on_work,
            work_pool=pool.beside(**harness.sandbox) if harness.sandbox else None,
        )
        self._harness = harness
        text = ChatText(protocol, tokenizer)
        self.session = Session(text, tokenizer, "call")
        self._client = AgentClient(text, harness.model, self._execute_command)
        self._key = ""
        self._kill: Callable[[], None] = lambda: None
        # For commands, which come in threads of the server: one at a time, and none after the end.
        self._commands = threading.Lock()
        self._over = False
        # The request that is being answered.
        self._pending: Pending | None = None
        # Messages of all contexts.
        self._messages = 0
        self._id = ""
        self._step: Step | None = None
        self._shared = 0
        # How the program ended by itself, and why it handed nothing in, in words.
        self._ending: Ending | None = None
        self._cause = ""

    @property
    def protocol(self) -> Protocol:
        """The protocol, with what ends the message that is asked for now."""
        pending = self._pending
        return self._protocol if pending is None else stopping(self._protocol, pending.request)

    @protocol.setter
    def protocol(self, protocol: Protocol) -> None:
        self._protocol = protocol

    @property
    def budget(self) -> int:
        """As ``Episode.budget``; the agent may ask for less."""
        if self.over or self._pending is None:
            return 0
        most = self._pending.request.max_tokens or self.limits.turn_tokens
        return min(most, self.limits.turn_tokens, self.limits.tokens - self.session.num_tokens)

    def start(self) -> list[int]:
        """Starts the agent's program and waits for its first request; the ids of its conversation.

        One that asks for nothing in its time is ended, and another one started: nothing was sampled
        so far, and a machine that was busy for a while should not end a run. Raises HarnessError
        where none comes again, or where it leaves no room for a message.
        """
        if self._key:
            raise ValueError(f"{self._name} was started twice")
        self._begin()
        step = self._next()
        if step is None and self.status == "time_limit":
            asked = "%s: its program asked for nothing within %g s; another one is started"
            logging.warning(asked, self._name, self.limits.tools_s)
            self._begin_again()
            step = self._next()
        if step is not None:
            return step.tokens
        causes = {
            "token_limit": "its first request leaves no room for an answer in "
            f"limits.tokens={self.limits.tokens}",
            "time_limit": f"it asked for nothing within limits.tools_s={self.limits.tools_s:g}",
        }
        self.close()
        raise HarnessError(f"{self._name}: {causes.get(self.status, self._cause)}")

    def _begin(self) -> None:
        self._key = self._harness.enter(self._client)
        url = self._harness.url_of(self._key)
        model = self._harness.model
        job = EpisodeFacts(
            self.task, url, self._key, model, self.limits, lambda: self._workspace.sandbox
        )
        start = functools.partial(self._harness.host.start, job)
        self._kill = self._calls.attempt(lambda: start(self._client.events.put))

    def _begin_again(self) -> None:
        """Starts another program, as if none had been started."""
        self._client.end()
        self._harness.leave(self._key)
        self._kill()
        self._client = AgentClient(self._client.text, self._harness.model, self._execute_command)
        self._calls.seconds = 0.0
        self.status = ""
        self._begin()

    def share(self, length: int) -> None:
        """Number of tokens at the start of the prompt that are the same in the whole group."""
        self._shared = length

    def sampling(self, tokens: Sequence[int]) -> None:
        """The tokens of the current message so far."""
        self._pending.sampled(tokens)

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> list[int] | Rewritten | None:
        """Answers the agent with a message, and waits for what it asks next. Returns the ids that
        follow; ``Rewritten`` where it goes on in another context; None when the episode is over.
        """
        tokens = [int(token) for token in tokens]
        logprobs = [float(logprob) for logprob in logprobs]
        self._check_message(tokens, logprobs, versions)
        before = self._step
        self._answer(tokens, logprobs, versions)
        self._messages += 1
        step = self._next()
        if step is None:
            return None
        if step.context == before.context:
            return list(step.given)
        return Rewritten(step.context, step.tokens)

    def finish(self) -> Trajectory:
        """As ``Episode.finish``; ends the agent's program first."""
        self._stop()
        return super().finish()

    @property
    def forkable(self) -> bool:
        """False: see ``fork``."""
        return False

    def fork(self, index: int) -> Episode:
        """Raises ValueError: the state of somebody else's program cannot be copied."""
        raise ValueError(f"{self._name} cannot be forked: its agent is a program of others")

    def close(self) -> None:
        """As ``Episode.close``."""
        self._stop()
        super().close()

    def _stop(self) -> None:
        """Ends the agent's program and every command, and refuses what it asks from now on."""
        self._client.end()
        if self._pending is not None:
            self._pending.fail(over())
            self._pending = None
        if self._key:
            self._harness.leave(self._key)
        self._kill()
        self._over = True  # no command begins from now on, not even for a sandbox built again
        with self._commands:  # one that runs has the time that it was given
            pass

    def _next(self) -> Step | None:
        """Waits for what the agent does next; its request, or None when the episode is over."""
        start = time.monotonic()
        lost_s = self._calls.lost_s
        self._workspace.deadline = start + self.limits.tools_s - self._calls.seconds
        step = None
        while step is None and (not self.over or self._unscored):
            try:
                left_s = self._workspace.deadline - time.monotonic()
                event = self._client.events.get(timeout=max(0.0, left_s))
            except queue.Empty:
                if time.monotonic() < self._workspace.deadline:
                    continue  # a sandbox was lost meanwhile, which costs the episode no time
                self.status = self.status or "time_limit"
                break
            if isinstance(event, SandboxFault):
                self._note(event)
            elif isinstance(event, Ending):
                self._end(event)
            else:
                step = self._take(*event)
        self._calls.seconds += time.monotonic() - start - (self._calls.lost_s - lost_s)
        return step

    def _refused(self, pending: Pending) -> bool:
        """True if a request comes when the episode is over, or ends it; it has failed then."""
        if not self.over and self._messages == self.limits.turns:
            self.status = "turn_limit"
        elif not self.over and self._workspace.out_of_time:
            self.status = "time_limit"
        if self.over:
            turns = f"an episode has {self.limits.turns} messages"
            pending.fail(too_long(turns) if self._unscored else over())
        return self.over

    def _take(self, pending: Pending, id: str) -> Step | None:
        """Takes a request; None where it is refused, or ends the episode."""
        if self._refused(pending):
            return None
        try:
            step = self.session.ask(pending.request)
        except ApiError as error:
            pending.fail(error)
            return None
        if self.session.num_tokens + len(step.given) >= self.limits.tokens:
            self.status = "token_limit"
            pending.fail(
                too_long(
                    f"the conversation has {len(step.tokens)} tokens, {len(step.given)} of them "
                    f"new; an episode has {self.limits.tokens} tokens"
                )
            )
            return None
        self.session.take(step)
        self._pending, self._id, self._step = pending, id, step
        self._frame.transcript = self.session.nodes[step.context].transcript
        return step

    def _answer(self, tokens: list[int], logprobs: list[float], versions: Sequence[int]) -> None:
        """Records a message and gives it to the agent."""
        pending = self._pending
        step = self._step
        message, calls = self.session.answer(
            step.context, tokens, logprobs, versions, pending.request.stop
        )
        self._malformed_calls += sum(call.error != "" for call in calls)
        if message.calls:
            reason = "tool_calls"
        else:
            ended = tokens[-1] in self.stop_ids or self.protocol.stopped(
                self._tokenizer.decode(tokens)
            )
            reason = "stop" if ended else "length"
        self._pending = None
        pending.answer(
            Answer(
                id=self._id,
                model=self._harness.model,
                message=message,
                finish_reason=reason,
                tokens=tokens,
                logprobs=logprobs,
                prompt_tokens=len(step.tokens),
                kept_tokens=step.kept,
                version=int(versions[-1]),
            )
        )

    @property
    def _unscored(self) -> bool:
        """True if the agent has reached a limit, and may still say what its work is worth."""
        limits = ("turn_limit", "token_limit")
        return self._harness.scores and self._ending is None and self.status in limits

    def _grade(self, files: Snapshot) -> Grade:
        if self._scores is None:
            return super()._grade(files)
        return Grade(submitted=True, hidden=(self._ending.solved,))

    def _end(self, ending: Ending) -> None:
        """The agent's program has ended by itself."""
        self._ending = ending
        self._cause = ending.cause
        self._scores = ending.scores
        if not self.over:
            self.status = "fault" if ending.fault else "agent_ended"
        if not ending.handed_in:
            level = logging.WARNING if ending.fault else logging.INFO
            message = "%s: the agent ended: %s"
            logging.log_every_n_seconds(level, message, 60, self._name, ending.cause)
            return
        if ending.scores is not None:  # nothing in the workspace is graded
            if self.status == "agent_ended":
                self.status = "submitted"
            return
        try:
            with self._commands:
                self._calls.attempt(self._hand_in)
            self.status = "time_limit" if self._workspace.handed_in is None else "submitted"
        except SandboxFault as fault:
            self._note(fault)
        except PROVOKED as error:
            self._cause = f"the files cannot be read in full: {error}"

    def _hand_in(self) -> None:
        """Hands in the files as they stand, if they are those of all commands. Raises what
        ``Workspace.hand_in`` raises.
        """
        if self._calls.whole:
            self._workspace.hand_in()

    def _execute_command(self, command: str, timeout_s: float | None) -> dict[str, Any]:
        """Runs a command of the agent's in the sandbox, in a thread of the server."""
        if self._harness.sandbox:
            raise ApiError("the agent runs its commands itself, in the sandbox", status=404)
        if "\0" in command:
            return _FAILED | {"error": "the command contains a NUL character"}
        run = functools.partial(self._run, command, timeout_s)
        with self._commands:
            try:
                return self._calls.attempt(lambda: self._calls.do(run))
            except SandboxFault as fault:
                self._client.events.put(fault)
                raise ApiError("the sandbox failed", status=500, kind="server_error") from fault

    def _run(self, command: str, timeout_s: float | None, workspace: Workspace) -> dict[str, Any]:
        """Result of a command in a workspace, as the API says it. Raises SandboxFault, and
        ApiError after the end.
        """
        if self._over:
            raise over()
        seconds = min(workspace.timeout_s, timeout_s or self.limits.command_s)
        try:
            done = workspace.sandbox.run(["bash", "-c", command], timeout_s=seconds)
        except PROVOKED as error:
            return _FAILED | {"error": f"{type(error).__name__}: {error}"}
        return {
            "output": done.stdout[:_WIDTH],
            "returncode": done.exit_code,
            "timed_out": done.timed_out,
            "error": f"stopped after {seconds:g} s" if done.timed_out else "",
        }

    def _recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...], int]:
        contexts, turns = self.session.contexts()
        return contexts, turns, self._shared or turns[0].end
