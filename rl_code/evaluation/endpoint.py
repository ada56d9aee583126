"""Suites played by a model that somebody else serves, over the OpenAI chat API with tools.

Tasks, tools, sandbox and graders are those of any evaluation; messages and calls take the place of
tokens. What is not known of such a model stays unknown: a trajectory has the number of its sampled
tokens as the server counts them, and neither their ids nor their log-probabilities.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

import numpy as np
from absl import logging

from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.episode import Episode
from rl_code.environment.finished import Rewarder
from rl_code.environment.messages import checked
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.environment.tools.tool import Tool
from rl_code.evaluation.suite import FOLDER
from rl_code.harness.chat_server import EndpointError, Server
from rl_code.host.files import write_atomically
from rl_code.rollout.sampling import SamplingConfig
from rl_code.types import Context, Group, Limits, Task, ToolCall, ToolResult, Trajectory, Turn

_NO_CALL = "no tool call; call a tool, and submit when the work is done"


@dataclasses.dataclass(frozen=True)
class Messages(Protocol):
    """No protocol of ours: the server puts messages into words."""

    stop_tokens: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Said:
    """A message that a server answered with."""

    content: str
    # The calls as the server wrote them, and as our tools take them.
    written: tuple[Mapping[str, Any], ...]
    calls: tuple[ToolCall, ...]
    # Why the message ended, in the API's words; "" where the server does not say.
    finish_reason: str
    # Tokens as the server counts them: of the message, and of the conversation with it.
    sampled: int
    total: int


def read_answer(server: Server, answer: Mapping[str, Any]) -> Said:
    """The message in the body of an answer. Raises EndpointError."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        usage = answer.get("usage") or {}
        written = tuple(message.get("tool_calls") or ())
        for call in written:
            if not isinstance(call["id"], str):
                raise TypeError(f"the id {call['id']!r} of a call is no text")
        return Said(
            content=message.get("content") or "",
            written=written,
            calls=tuple(_read(call["function"]) for call in written),
            finish_reason=str(choice.get("finish_reason") or ""),
            sampled=int(usage.get("completion_tokens") or 0),
            total=int(usage.get("total_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EndpointError(
            f"{server.url} answered what is no chat completion ({error!r}): "
            f"{json.dumps(answer)[:300]}"
        ) from error


class Turns:
    """Record of an episode whose tokens nobody but the server knows."""

    def __init__(self):
        self._turns: list[Turn] = []
        self._sampled = 0

    def add(self, role: Any, sampled: int, text: str, **what: Any) -> None:
        """A turn of so many sampled tokens. what: further fields of ``Turn``."""
        start = self._sampled
        self._sampled += sampled
        self._turns.append(Turn(role, start, self._sampled, text, **what))

    def recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...], int]:
        """As ``Episode._recorded``: one context, of the sampled tokens alone."""
        count = self._sampled
        context = Context(
            tokens=np.full(count, -1, np.int32),
            sampled=np.ones(count, bool),
            logprobs=np.full(count, np.nan, np.float32),
            versions=np.full(count, -1, np.int32),
        )
        return (context,), tuple(self._turns), 0


class PlayedEpisode(Interface):
    """An episode that a server's model plays."""

    def play(self) -> Trajectory:
        """Plays and grades the episode. Raises EndpointError."""
        ...

    def record(self) -> dict[str, Any]:
        """Its messages, as they are written down: JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class Served:
    """Shared parts of the episodes of a suite that a served model plays."""

    server: Server
    sampling: SamplingConfig
    pool: SandboxPool
    limits: Limits
    reward: Rewarder
    # As of ``Episode``.
    on_work: Callable[[Task, int, Snapshot | None], None] | None = None
    # Which parts of messages are told to the server to be documents; None for none of them.
    documents: DocumentsConfig | None = None

    def of_episode(self) -> dict[str, Any]:
        """Arguments of ``Episode``."""
        return {
            "group": 0,
            "protocol": Messages(),
            "tokenizer": None,
            "pool": self.pool,
            "limits": self.limits,
            "reward": self.reward,
            "on_work": self.on_work,
        }

    def sampled(self, seed: int, most: int, total: int) -> dict[str, Any]:
        """Request by which the server is asked to sample a message of at most so many tokens, in a
        conversation that has ``total``.
        """
        return {
            "max_tokens": min(most, max(1, self.limits.tokens - total)),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": seed,
        }


class ChatEpisode(Episode):
    """An episode whose messages come from a server. ``play`` goes through all of it."""

    def __init__(
        self, task: Task, served: Served, *, index: int, seed: int, tools: Mapping[str, Tool]
    ):
        # sub-agents would be contexts of another policy
        own = {name: tool for name, tool in tools.items() if tool.delegation is None}
        super().__init__(task, index=index, tools=own, **served.of_episode())
        self._served, self._seed = served, seed
        self.messages: list[dict[str, Any]] = [dict(message) for message in task.messages]
        self._turns = Turns()
        # Tokens of the conversation, as the server counted them last.
        self._total = 0

    def play(self) -> Trajectory:
        """As ``PlayedEpisode.play``."""
        try:
            while not self.over:
                answer = self._served.server.ask(self._request())
                if answer is None:
                    self.status = "token_limit"
                else:
                    self._take(answer)
            return self.finish()
        finally:
            self.close()

    def record(self) -> dict[str, Any]:
        """As ``PlayedEpisode.record``."""
        return {"messages": self.messages}

    def _request(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": tool.schema} for tool in self.tools.values()]
        sampled = self._served.sampled(self._seed, self.limits.turn_tokens, self._total)
        return {"messages": self.messages, "tools": tools, **sampled}

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Carries out what a message asks for, and appends what the server gets to see."""
        said = read_answer(self._served.server, answer)
        self._total = said.total
        own: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.written:
            own["tool_calls"] = list(said.written)
        self.messages.append(own)
        frame = self._frame
        calls = checked(said.calls, frame, self.limits) or (ToolCall("", {}, _NO_CALL),)
        self._malformed_calls += sum(call.error != "" for call in calls)
        self._turns.add("assistant", said.sampled, said.content, calls=calls)
        frame.take_calls(calls, self.limits.calls)
        self._answered(frame)
        results = frame.results
        self._turns.add("tool", 0, "\n".join(r.content for r in results), results=tuple(results))
        if not said.written:
            self.messages.append({"role": "user", "content": results[0].content})
        # One result stands for all calls beyond the limit, and each call needs an answer.
        last = results[-1].content
        for number, call in enumerate(said.written):
            content: Any = last
            if number < len(results):
                content = self._shown(results[number])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not self.over and self._total >= self.limits.tokens:
            self.status = "token_limit"

    def _shown(self, result: ToolResult) -> str | list[dict[str, str]]:
        """A result as the server gets it: by the rule of ``result_parts``, with documents as parts
        that say so.
        """
        documents = self._served.documents
        if documents is None or not documents.results:
            return result.content
        is_document = result.ok and self.tools[result.name].documents
        return [{"type": "document" if is_document else "text", "text": result.content}]

    def _recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...], int]:
        return self._turns.recorded()


def _read(function: Mapping[str, Any]) -> ToolCall:
    """A call of the API as our tools take it."""
    name = str(function["name"])
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        return ToolCall(name, {}, f"the arguments are not valid JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments must be a JSON object")
    return ToolCall(name, arguments)


def play_suite(
    tasks: Sequence[Task],
    make_episode: Callable[[Task, int], PlayedEpisode],
    *,
    samples: int,
    workers: int,
    folder: Path,
    name: str,
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Group]:
    """Plays ``samples`` episodes of every task, ``workers`` at once; writes their messages down.

    make_episode: of a task, by its index among the task's. name: "<suite>.<label>". Raises
    EndpointError, after episodes that have begun are over.
    """

    def play(pair: tuple[Task, int]) -> tuple[Trajectory, dict[str, Any]]:
        episode = make_episode(*pair)
        trajectory = episode.play()
        on_finished(trajectory)
        return trajectory, episode.record()

    pairs = [(task, index) for task in tasks for index in range(samples)]
    with ThreadPoolExecutor(workers, thread_name_prefix="endpoint") as executor:
        try:
            played = list(executor.map(play, pairs))
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise
    lines = [
        {
            "task_id": trajectory.task_id,
            "index": trajectory.index,
            "status": trajectory.status,
            "solved": trajectory.solved,
            "reward": trajectory.reward.total,
            **record,
        }
        for trajectory, record in played
    ]
    path = folder / FOLDER / f"{name}.messages.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
    write_atomically(path, gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0))
    logging.info("messages are in %s", path)
    groups = []
    for at, task in enumerate(tasks):
        own = played[at * samples : (at + 1) * samples]
        groups.append(Group(task, tuple(trajectory for trajectory, _ in own)))
    return groups
