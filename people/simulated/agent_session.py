"""A simulated person brings one want to an agent by HTTP, and works with what the agent does.

The agent's messages come from the served chat API. Its calls are carried out here, on the person's
side, in a sandbox of this project. The person then reads what it did (``agent_person``) and goes on
in the same conversation, with another model, or alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from people.simulated.agent_person import AgentPerson, Decision, Happened, Turn
from people.simulated.changes import Change
from people.simulated.client import Client, Said, ServerRefused
from people.simulated.own_tools import OwnTools
from rl_code.environment.grading import mark
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.tools.ask import ANSWER
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Case, Limits, Task, Tests

AUTO = "auto"
# Of a task without visible tests: so many of the hidden cases are the person's own tests.
_OWN_CASES = 2
# Seconds of one grading.
_GRADE_S = 5.0
_ASK, _TEST = "ask", "run_tests"
# Parts of the messages of a server that refuses a conversation for its length, and a model that it
# serves no more.
_TOO_LONG, _GONE = "context_length_exceeded", "model_not_found"


@dataclasses.dataclass(frozen=True)
class Desk:
    """Equipment of a person: the agent's tools, sandboxes, and limits of a turn."""

    tools: OwnTools
    pool: SandboxPool
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Tried:
    """One turn of the agent, and what the person made of it."""

    model: str
    turn: Turn
    decision: Decision


class Session:
    """One want of one person, from the first message until it is done or given up."""

    def __init__(
        self,
        person: AgentPerson,
        client: Client,
        desk: Desk,
        task: Task,
        report: Callable[[Happened], None],
    ):
        """report: takes what happened to answers, to be sent to the server."""
        self._person, self._client, self._desk, self._task = person, client, desk, task
        self._report = report
        self._messages: list[dict[str, Any]] = []

    def work(self, disappointed: int = 0) -> list[Tried]:
        """All turns of the want. disappointed: disappointments in a row before it.

        Raises ServerRefused and SandboxFault.
        """
        habits = self._person.habits
        model, files = AUTO, dict(self._task.files)
        tried: list[Tried] = []
        said = want_of(self._task)
        for attempt in range(habits.patience + 1):
            self._say(said)
            turn = self._turn(model, files)
            decision = self._person.decide(turn, attempt)
            for one in decision.happened:
                self._report(one)
            tried.append(Tried(model, turn, decision))
            disappointed = disappointed + 1 if decision.disappointed else 0
            if decision.done:
                break
            files = dict(decision.files)
            if disappointed >= habits.switches and model == AUTO:
                model = self._switch(turn)
            # who asks again says what was meant
            said = "\n".join([*filter(None, [decision.says]), want_of(self._task, meant=True)])
        return tried

    def _say(self, text: str) -> None:
        """The person's next message. The first one of a conversation shows the files as well."""
        begun = any(message["role"] == "user" for message in self._messages)
        files = () if begun else shown_of(self._task)
        content = [*files, {"type": "text", "text": text}] if files else text
        self._messages.append({"role": "user", "content": content})

    def _switch(self, turn: Turn) -> str:
        """Another model of the server where there is one, asked in a conversation of its own."""
        answers = turn.answers or turn.questions
        self._report(Happened(answers, "switched", 30.0, 1.0))
        others = [name for name in self._client.models() if name != AUTO]
        self._messages.clear()
        return others[-1] if others else AUTO

    def _turn(self, model: str, files: Mapping[str, str]) -> Turn:
        """The agent works until it hands in, says something without a call, or has said enough."""
        task = dataclasses.replace(self._task, files=dict(files))
        desk = self._desk
        workspace = Workspace(task, desk.pool, desk.limits, verbose=False)
        answers: list[str] = []
        questions: list[str] = []
        called: set[str] = set()
        try:
            for _ in range(desk.limits.turns):
                said = self._ask(model)
                names = {desk.tools.called(name) for name, _ in said.calls}
                called |= names
                (questions if _asks(said, names) else answers).append(said.id)
                self._carry_out(said, workspace)
                if workspace.handed_in is not None or (not said.calls and not _asks(said, names)):
                    break
            after = workspace.handed_in
            after = texts(workspace.snapshot() if after is None else after)
            handed_in = workspace.handed_in is not None
        finally:
            workspace.close()
        offered = {desk.tools.called(name) for name in desk.tools.names}
        passes, right = self._graded(after)
        return Turn(
            answers=tuple(answers),
            questions=tuple(questions),
            change=Change(dict(files), after),
            wanted=self._task.reference or {},
            handed_in=handed_in,
            ambiguous=not self._task.meta.get("clear", True),
            tested=_TEST in called if _TEST in offered else None,
            passes=passes,
            right=right,
        )

    def _ask(self, model: str) -> Said:
        """The next message. A conversation that is too long for the model is begun anew, and where
        a model is served no more the server chooses one.
        """
        tools, most = self._desk.tools.schemas, self._desk.limits.turn_tokens
        try:
            said = self._client.chat(self._messages, tools, model, max_tokens=most)
        except ServerRefused as error:
            if _GONE in str(error) and model != AUTO:
                return self._ask(AUTO)
            if _TOO_LONG not in str(error) or len(self._messages) == 1:
                raise
            last = [one["content"] for one in self._messages if one["role"] == "user"][-1]
            self._messages.clear()
            self._say(last if isinstance(last, str) else last[-1]["text"])
            return self._ask(model)
        self._messages.append({"role": "assistant", **said.message})
        return said

    def _carry_out(self, said: Said, workspace: Workspace) -> None:
        """Carries out the calls of a message, and answers a question in words."""
        written = said.message.get("tool_calls") or ()
        for (name, arguments), call in zip(said.calls, written, strict=True):
            # a call behind a submit finds nobody who would carry it out
            over = workspace.handed_in is not None
            content = "over" if over else self._desk.tools.run(name, arguments, workspace).content
            result = {"role": "tool", "tool_call_id": call["id"], "content": content}
            self._messages.append(result)
        if not said.calls and _asks(said, set()):
            meant = str(self._task.meta.get(ANSWER) or want_of(self._task))
            self._messages.append({"role": "user", "content": meant})

    def _graded(self, files: Mapping[str, str]) -> tuple[bool, bool]:
        """True if files pass the person's own tests, and if they pass all tests."""
        if files == self._task.files:
            return False, False
        own, every = tests_of(self._task)
        cases = Tests(cases=every, code=self._task.hidden_tests.code)
        marks = mark(self._task, cases, dict(files), self._desk.pool, _GRADE_S, canaries=0)
        errors = marks.errors
        return not any(errors[: len(own)]), not any(errors)


def tests_of(task: Task) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """The person's own cases, and all of them, own ones first."""
    own, hidden = task.visible_tests.cases, task.hidden_tests.cases
    return (own, own + hidden) if own else (hidden[:_OWN_CASES], hidden)


def want_of(task: Task, *, meant: bool = False) -> str:
    """The want in the person's words; with what was meant, where it can be read in two ways."""
    content = task.messages[-1]["content"]
    parts = () if isinstance(content, str) else content
    texts = (part["text"] for part in parts if part["type"] == "text")
    want = content if isinstance(content, str) else "".join(texts)
    clearer = "" if task.meta.get("clear", True) or not meant else task.meta.get(ANSWER, "")
    return f"{want}\n{clearer}" if clearer else want


def shown_of(task: Task) -> tuple[Mapping[str, str], ...]:
    """The files that the person shows before the want, as parts of a message: its documents."""
    content = task.messages[-1]["content"]
    if isinstance(content, str):
        return ()
    return tuple(part for part in content if part["type"] == "document")


def _asks(said: Said, called: set[str]) -> bool:
    """True for a message that asks the person something, by a tool or in words."""
    return _ASK in called or (not said.calls and said.text.rstrip().endswith("?"))
