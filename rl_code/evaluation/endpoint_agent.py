"""Suites played by an agent of others whose messages come from a model that somebody else serves.

The agent's program runs as in any episode of its kind (``harness.episode``): it asks our server,
its commands run in the sandbox, and limits and grading are those of the run. Only the messages are
not sampled here: each request goes on to the other server, with the sampling settings of the suite.

Departures from episodes whose messages the engine samples: nothing is tokenised, so ``limits.
tokens`` bounds each conversation, as the server counts it, and not all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.evaluation.endpoint import Served, Turns, read_answer
from rl_code.harness.endpoint.answers import Answer, Pending
from rl_code.harness.endpoint.chat_text import Pieces
from rl_code.harness.endpoint.conversation import Call, Message
from rl_code.harness.endpoint.fields import refuse
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.harness.endpoint.session import Step
from rl_code.harness.episode import AgentEpisode, too_long
from rl_code.harness.harness import Harness
from rl_code.types import Context, Task, Trajectory, Turn


class ForwardedEpisode(AgentEpisode):
    """An episode of an agent of others, with a server's model. ``play`` goes through all."""

    def __init__(self, task: Task, served: Served, *, index: int, seed: int, harness: Harness):
        super().__init__(task, index=index, harness=harness, **served.of_episode())
        self._served, self._seed = served, seed
        self._turns = Turns()
        # The conversations so far; the agent goes on with the last one, or begins another.
        self._conversations: list[list[Message]] = []
        # Tokens of the conversation, as the server counted them last.
        self._total = 0

    def play(self) -> Trajectory:
        """As ``PlayedEpisode.play``. Raises HarnessError, too."""
        try:
            self.start()
            asks = True
            while asks:
                self._answer_by_server()
                asks = self._next() is not None
            return self.finish()
        finally:
            self.close()

    def record(self) -> dict[str, Any]:
        """As ``PlayedEpisode.record``: the last conversation, and those that the agent did not go
        on with.
        """
        *earlier, last = [[_written(one) for one in each] for each in self._conversations] or [[]]
        return {"messages": last, "earlier": earlier}

    def _take(self, pending: Pending, id: str) -> Step | None:
        if self._refused(pending):
            return None
        request = pending.request
        assert isinstance(request, ChatRequest)  # the client has refused other kinds
        if request.logprobs:
            why = "those of this model are not known here"
            pending.fail(refuse("logprobs", why, "unsupported_value"))
            return None
        if not self._conversations or not _goes_on(request.messages, self._conversations[-1]):
            self._conversations.append([])
            self._total = 0
        if self._total >= self.limits.tokens:
            self.status = "token_limit"
            asked = f"the conversation has {self._total} tokens"
            pending.fail(too_long(f"{asked}; an episode has {self.limits.tokens}"))
            return None
        known = self._conversations[-1]
        new = request.messages[len(known) :]
        role = "tool" if self._messages else "prompt"
        self._turns.add(role, 0, "\n".join(message.content for message in new))
        known += new
        self._pending, self._id = pending, id
        # no tokens: nothing is sampled here
        return Step(request, 0, False, -1, 0, [], 0, Pieces([], []))

    def _answer_by_server(self) -> None:
        """Has the server answer the request that waits. Raises EndpointError."""
        pending = self._pending
        assert pending is not None and isinstance(pending.request, ChatRequest)
        body = self._body(pending.request)
        answer = self._served.server.ask(body)
        self._pending = None
        if answer is None:
            self.status = "token_limit"
            pending.fail(too_long("the server has no room for this conversation"))
            return
        said = read_answer(self._served.server, answer)
        self._total = said.total
        self._messages += 1
        self._malformed_calls += sum(call.error != "" for call in said.calls)
        self._turns.add("assistant", said.sampled, said.content, calls=said.calls)
        message = Message("assistant", said.content, tuple(map(_call, said.written)))
        self._conversations[-1].append(message)
        pending.answer(
            Answer(
                id=self._id,
                model=self._harness.model,
                message=message,
                finish_reason=said.finish_reason or ("tool_calls" if message.calls else "stop"),
                # which tokens they are, only the server knows
                tokens=[-1] * said.sampled,
                logprobs=[math.nan] * said.sampled,
                prompt_tokens=max(0, said.total - said.sampled),
                kept_tokens=0,
                version=0,
            )
        )

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        """Request to the server: the agent's request, sampled as the suite says."""
        most = min(request.max_tokens or self.limits.turn_tokens, self.limits.turn_tokens)
        body: dict[str, Any] = {
            "messages": [_written(message) for message in request.messages],
            **self._served.sampled(self._seed, most, self._total),
        }
        if request.tools:
            body["tools"] = [{"type": "function", "function": dict(one)} for one in request.tools]
        if request.stop:
            body["stop"] = list(request.stop)
        return body

    def _recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...], int]:
        return self._turns.recorded()


def _goes_on(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """True if a request's messages begin with these, and more follow."""
    same = [one.same_as(asked) for asked, one in zip(messages, known, strict=False)]
    return len(messages) > len(known) and all(same)


def _call(written: Mapping[str, Any]) -> Call:
    function = written["function"]
    return Call(written["id"], str(function["name"]), function["arguments"] or "")


def _written(message: Message) -> dict[str, Any]:
    """A message as the API has it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    if message.call_id:
        fields["tool_call_id"] = message.call_id
    return fields
