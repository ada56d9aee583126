"""Compares what clients were told with what the database and the versions hold."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Row, select

from models.tokenizer import Tokenizer
from people.feedback.tables import ANSWERS, EVENTS, TRAINING_SETS, USES
from people.feedback.waiting import NO_WAIT, Wait
from people.realtime.ledger import Ledger
from people.realtime.tables import CYCLES, EDGES, VERSIONS
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.record import CheckpointError
from rl_code.harness.endpoint.chat_text import ChatText

# How many examples a problem names.
_NAMED = 3


@dataclasses.dataclass
class Audit:
    """Counts, and everything that is wrong."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def none(self, what: str, found: Iterable[Any]) -> None:
        """Each of these is a problem."""
        listed = [str(one) for one in found]
        if listed:
            more = ", ..." if len(listed) > _NAMED else ""
            self.problems.append(f"{len(listed)} {what}: {', '.join(listed[:_NAMED])}{more}")


@dataclasses.dataclass
class Told:
    """Entries of the clients' journal."""

    # Id -> the line of an answer that was acknowledged.
    answers: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Lines of requests without an answer.
    failed: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    # Key -> event that was sent, and the keys that were acknowledged.
    sent: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    acknowledged: set[str] = dataclasses.field(default_factory=set)
    refused: list[str] = dataclasses.field(default_factory=list)
    # Ids that came twice.
    twice: list[str] = dataclasses.field(default_factory=list)


def read_journal(path: Path) -> Told:
    """The journal of ``experiments.load.clients``."""
    told = Told()
    for line in lines(path):
        match line["what"]:
            case "answer":
                if line["id"] in told.answers:
                    told.twice.append(line["id"])
                told.answers[line["id"]] = line
            case "no answer":
                told.failed.append(line)
            case "sent":
                told.sent |= {event["key"]: event for event in line["events"]}
            case "events":
                told.acknowledged |= set(line["keys"])
                told.refused += [f"{key} ({why})" for key, why in line["refused"].items()]
            case "refused":
                told.refused.append(line["why"])
    return told


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal that are whole."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def check_record(
    audit: Audit, engine: sqlalchemy.Engine, told: Told, texts: Texts | Messages
) -> None:
    """Everything that was acknowledged is there once and as it was told, and nothing else is."""
    with engine.connect() as connection:
        columns = ANSWERS.c.id, ANSWERS.c.tokens, ANSWERS.c.finish_reason, ANSWERS.c.session
        answers = {row.id: row for row in connection.execute(select(*columns))}
        rows = connection.execute(select(EVENTS)).all()
    events = {row.key: row for row in rows}
    whole = {id for id, row in answers.items() if row.finish_reason != "aborted"}
    audit.none("answers acknowledged twice", told.twice)
    audit.none("acknowledged answers lost", told.answers.keys() - whole)
    audit.none(
        "acknowledged answers recorded with another text",
        (
            id
            for id, line in told.answers.items()
            if id in answers and not texts.same(answers[id].tokens, line)
        ),
    )
    # of each answer that nobody was told of, a client saw its request fail
    untold = whole - told.answers.keys()
    if len(untold) > len(told.failed):
        audit.problems.append(
            f"{len(untold)} answers are recorded that no client was told of, and only "
            f"{len(told.failed)} requests failed"
        )
    audit.none("acknowledged events lost", told.acknowledged - events.keys())
    audit.none("events counted twice", doubles(row.key for row in rows))
    audit.none("events that nobody sent", events.keys() - told.sent.keys())
    audit.none("events refused", told.refused)
    audit.none(
        "events recorded otherwise than they were sent",
        (
            key
            for key in events.keys() & told.sent.keys()
            if any(getattr(events[key], name) != one for name, one in told.sent[key].items())
        ),
    )
    audit.counts |= {
        "answers acknowledged": len(told.answers),
        "answers recorded": len(answers),
        "of them cut off": len(answers) - len(whole),
        "of them whole, but not acknowledged": len(untold),
        "requests without an answer": len(told.failed),
        "events sent": len(told.sent),
        "events acknowledged": len(told.acknowledged),
        "events recorded": len(rows),
    }


class Texts:
    """Tells whether the text that a client got is that of the recorded tokens."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Iterable[int]):
        self._tokenizer, self._stops = tokenizer, set(stop_ids)

    def same(self, tokens: tuple[int, ...], line: Mapping[str, Any]) -> bool:
        words = [token for token in tokens if token not in self._stops]
        return len(tokens) == line["tokens"] and self._tokenizer.decode(words) == line["text"]


class Messages:
    """Tells whether the message of an agent that a client got is that of the recorded tokens."""

    def __init__(self, text: ChatText, tools: Sequence[Mapping[str, Any]]):
        self._text, self._tools = text, tools

    def same(self, tokens: tuple[int, ...], line: Mapping[str, Any]) -> bool:
        message, _ = self._text.read(tokens, self._tools, "call")
        calls = [[call.name, call.arguments] for call in message.calls]
        told = line["tokens"], line["content"] or "", line["calls"]
        return told == (len(tokens), message.content or "", calls)


def check_cycles(
    audit: Audit,
    engine: sqlalchemy.Engine,
    versions: Path,
    batch: int,
    wait: Wait = NO_WAIT,
    control: int | None = None,
) -> None:
    """No answer is trained on twice, none is lost, and one version is deployed at any time.

    versions: the folder of the checkpoints. batch: the most answers of a cycle; 0 for all. wait: of
    answers, before a cycle takes them. control: the version that some users always have; None for
    none.
    """
    ledger = Ledger(engine)
    cycles, edges = ledger.rows(CYCLES), ledger.rows(EDGES)
    with engine.connect() as connection:
        used = connection.execute(select(USES).order_by(USES.c.cycle, USES.c.place)).all()
        sets = {row.cycle: row for row in connection.execute(select(TRAINING_SETS))}
        columns = ANSWERS.c.id, ANSWERS.c.version, ANSWERS.c.asked_at, ANSWERS.c.finish_reason
        order = ANSWERS.c.recorded_at, ANSWERS.c.id
        answers = connection.execute(select(*columns).order_by(*order)).all()
        # cycle -> the answers that it could take
        ready = {
            number: set(connection.scalars(select(ANSWERS.c.id).where(wait.is_over(row.watermark))))
            for number, row in sets.items()
        }
    audit.none("answers in two training sets", doubles(row.answer for row in used))
    _check_edges(audit, edges)
    selected: dict[int, list[str]] = collections.defaultdict(list)
    for row in used:
        selected[row.cycle].append(row.answer)
    made = 0
    for cycle in cycles:
        if cycle.number in sets and len(selected[cycle.number]) != sets[cycle.number].answers:
            audit.problems.append(f"cycle {cycle.number}: its training set is not whole")
        told = _told(versions, cycle.candidate)
        if told is None:
            continue
        made += 1
        made_of = told["made_of"]
        if left_out := told.get("left_out", 0):
            audit.problems.append(
                f"cycle {cycle.number}: {left_out} answers were marked and not trained on"
            )
        ids = hashlib.sha256(",".join(selected[cycle.number]).encode()).hexdigest()
        if made_of != f"{cycle.base}/{cycle.digest}/{ids}":
            audit.problems.append(
                f"version {cycle.candidate} was made of {made_of}, and cycle {cycle.number} has "
                f"{cycle.base}/{cycle.digest}/{ids}"
            )
    _check_ready(audit, cycles, selected, ready, answers, batch)
    served = {row.id: row for row in answers}
    audit.none(
        "answers trained on that were cut off",
        (row.answer for row in used if served[row.answer].finish_reason == "aborted"),
    )
    deployed = [row.version for row in ledger.rows(VERSIONS) if row.state == "deployed"]
    if len(deployed) != 1:
        audit.problems.append(f"versions {deployed} are deployed")
    allowed = Allowed(cycles, edges, control)
    audit.none(
        "answers of a version that was not served then",
        (f"{row.id} at {row.asked_at:.3f}" for row in answers if not allowed.at(row)),
    )
    ends = collections.Counter(row.state for row in cycles if row.ended_at is not None)
    audit.counts |= {
        "cycles ended": sum(ends.values()),
        **{f"of them {state}": count for state, count in ends.items()},
        "versions made": made,
        "answers trained on": len(used),
    }


def _check_edges(audit: Audit, edges: Iterable[Row]) -> None:
    """Each edge was taken once, and goes on where the one before it ended."""
    last: dict[int, Row] = {}
    for edge in edges:
        before = last.get(edge.cycle)
        number, state = (before.number, before.after) if before else (0, "collect")
        if (edge.number, edge.before) != (number + 1, state):
            audit.problems.append(f"edge {edge.number} of cycle {edge.cycle} is out of order")
        last[edge.cycle] = edge


def _check_ready(
    audit: Audit,
    cycles: Iterable[Row],
    selected: Mapping[int, list[str]],
    ready: Mapping[int, set[str]],
    answers: Sequence[Row],
    batch: int,
) -> None:
    """Nothing that was selected is another version's, nothing was taken too early, and nothing that
    could be was skipped: of the deployed version's answers all that were ready are taken up to the
    last one, or the newest ``batch``.
    """
    version = {row.id: row.version for row in answers}
    order = {row.id: place for place, row in enumerate(answers)}
    whole = [row for row in answers if row.finish_reason != "aborted"]
    taken: set[str] = set()
    for cycle in cycles:
        ids = selected.get(cycle.number)
        if not ids:
            continue
        audit.none(
            f"answers of cycle {cycle.number} that its version {cycle.base} did not give",
            (id for id in ids if version[id] != cycle.base),
        )
        audit.none(
            f"answers that cycle {cycle.number} took before their wait was over",
            (id for id in ids if id not in ready[cycle.number]),
        )
        mine = set(ids)
        first = order[ids[0]] if len(ids) == batch else 0
        last = order[ids[-1]]
        audit.none(
            f"answers that cycle {cycle.number} has skipped",
            (
                row.id
                for row in whole
                if row.version == cycle.base
                and first <= order[row.id] <= last
                and row.id in ready[cycle.number]
                and row.id not in taken
                and row.id not in mine
            ),
        )
        taken |= mine


class Allowed:
    """Versions that may have answered at a time, by the edges that were taken."""

    def __init__(self, cycles: Iterable[Row], edges: Iterable[Row], control: int | None = None):
        self._control = control
        by_number = {row.number: row for row in cycles}
        # (Unix seconds from which it holds, versions): what the state that is entered then allows
        self._spans = [(float("-inf"), {by_number[1].base})] if by_number else []
        for edge in sorted(edges, key=lambda edge: (edge.cycle, edge.number)):
            cycle = by_number[edge.cycle]
            both = {cycle.base, cycle.candidate}
            # a promoted version is served alone, and so is the old one after a roll-back, once the
            # fleet has followed: before the next edge
            now = {
                "deploy": both,
                "watch": both,
                "promote": both,
                "roll_back": both,
                "promoted": {cycle.candidate},
            }
            self._spans.append((edge.at, now.get(edge.after, {cycle.base})))

    def at(self, answer: Row) -> bool:
        """True if the version of an answer may have been asked when it was."""
        versions = [found for at, found in self._spans if at <= answer.asked_at]
        return answer.version in versions[-1] or answer.version == self._control


def _told(versions: Path, version: int | None) -> Mapping[str, Any] | None:
    """Statement of a version about its training (``Versions.write``); None for one that is not
    there, or not whole.
    """
    if version is None:
        return None
    try:
        return checkpoint.record_of(versions / str(version), version).position
    except CheckpointError:
        return None


def doubles(found: Iterable[str]) -> list[str]:
    """Those that come more than once."""
    return [one for one, count in collections.Counter(found).items() if count > 1]
