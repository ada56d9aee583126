"""The cycle as a machine of states in the database.

    collect -> train -> gate -> deploy -> watch -> promote -> (promoted)
                 |       |                  |
                 |       |                  +----> roll_back -> (rolled_back)
                 +-------+----> (refused)

A state says what is to be done next. Its work is done outside the database by calls that may be
repeated (``parts``); then one transaction takes the edge, and with it the versions' states and the
beginning of the next cycle. A process that is killed does the work of its state again, and that
comes to the same. What the fleet serves follows from the state alone, and is applied before every
step, so a fleet that was down, or a kill between a decision and its effect, is mended by going on.

A step is taken from the count of edges that was read. Of two processes that run one cycle, or a
process and a person who rolls back by hand, one is told that it was overtaken, and reads again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging
from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from people.feedback import database
from people.feedback.outcomes import Selection
from people.realtime import gate, monitors, watching
from people.realtime.gate import GateConfig
from people.realtime.ledger import Ledger, distance
from people.realtime.monitors import MonitorsConfig
from people.realtime.parts import Overtaken, Parts, Routing, TrainingFailed, never
from people.realtime.watching import WatchConfig, finite
from rl_code.config.read_config import ConfigError, at_least
from rl_code.host.stop import Stopped

# A look at thousands of sessions takes a processor from those who are being served. So it waits
# for so many times as long as a look has taken, if that is longer than ``poll_s``.
_REST = 4.0
STATES = ("collect", "train", "gate", "deploy", "watch", "promote", "roll_back")


@dataclasses.dataclass(frozen=True)
class CycleConfig:
    """Settings of a cycle: times of its edges, and least and most data."""

    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    monitors: MonitorsConfig = dataclasses.field(default_factory=MonitorsConfig)
    # The version that every candidate is compared with, beside the deployed one.
    anchor: int = 0
    # Seconds from the beginning of a cycle to its training, at least.
    cadence_s: float = 18_000.0
    # Share of users who always have the anchor, a copy that never changes, for comparison; 0 for
    # none. They are in no experiment, and nothing is trained on their answers once the anchor is
    # outside of the window.
    control_share: float = 0.0
    # Sessions that a cycle needs to train on.
    least_sessions: int = 100
    # Answers that a cycle trains on at most, the newest; 0 for as many as ``window`` updates take.
    # The objective is noisy, so a batch is large.
    batch: int = 0
    # The weights that an update changes are fewer than this many updates away from those that gave
    # the answers, those of the same cycle counted. With 1 a cycle is one update, on answers of the
    # deployed version alone. Answers of other versions are counted and left out.
    window: int = 1
    # Seconds between two looks while nothing is due.
    poll_s: float = 10.0

    def __post_init__(self) -> None:
        at_least(self, cadence_s=0, least_sessions=1, batch=0, window=1)
        if self.poll_s <= 0:
            raise ValueError(f"{self.poll_s=} must be positive")
        if not 0 <= self.control_share < 1:
            raise ValueError(f"{self.control_share=} must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class Edge:
    """Description of the next edge of a cycle."""

    cycle: int
    state: str
    # True if the edge is due; False while the cycle waits for something.
    due: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Notice:
    """An edge that was taken, or what is waited for."""

    cycle: int
    before: str
    # None while it waits.
    after: str | None
    reason: str


class Cycle:
    """Goes from edge to edge; the database is all that it remembers."""

    def __init__(
        self,
        ledger: Ledger,
        parts: Parts,
        config: CycleConfig,
        clock: Callable[[], float] = time.time,
        tell: Callable[[Notice], None] = lambda notice: None,
    ):
        """tell: is given each edge as it is taken, and what each look waits for.

        Raises ConfigError for bounds of what the parts never say (``check_names``), and for a batch
        that takes more updates than the window has (``check_batch``).
        """
        check_names(config, parts)
        check_batch(config, parts)
        self._ledger = ledger
        self._parts = parts
        self._config = config
        self._clock = clock
        self._tell = tell

    def run(self, cycles: int | None = None, stop: Callable[[], bool] = never) -> None:
        """Takes edges until a number of cycles has ended, counted from the first one; for ever
        without. stop: asked between two edges, and while none is due. Returns too when a part was
        stopped in its work, which is then begun again by whoever goes on with the cycle.
        """
        with contextlib.suppress(Stopped):
            self._run(cycles, stop)

    def _run(self, cycles: int | None, stop: Callable[[], bool]) -> None:
        while not stop():
            taken, rest_s = False, self._config.poll_s
            with _waiting():
                row = self._ledger.current()
                # not part of the look: a first version may have to be trained before it is served
                self._follow(row)
                if cycles is not None and row.number > cycles:
                    return
                begin = time.monotonic()
                try:
                    taken = self._take(row)
                finally:
                    rest_s = max(rest_s, _REST * (time.monotonic() - begin))
            if not taken:
                self._parts.wait(rest_s, stop)

    def step(self) -> bool:
        """Does the work of the state and takes the edge if it is due; False if it is not.

        Raises Overtaken if another process took it.
        """
        row = self._ledger.current()
        self._follow(row)
        return self._take(row)

    def plan(self) -> Edge:
        """Return the plan of the next ``step``, without taking the step."""
        row = self._ledger.current()
        due, text = True, ""
        match row.state:
            case "collect":
                due, text = self._collectable(row)[1:]
            case "train":
                _, after, text = self._trainable(row)
                text = f"{after}: {text}" if after else text
            case "gate":
                text = (
                    f"play the suites with versions {row.candidate}, {row.base} and "
                    f"{self._config.anchor}, then deploy or refuse {row.candidate}"
                )
            case "deploy":
                share = self._config.watch.share
                text = f"watch version {row.candidate}, which {100 * share:g} % of users get"
            case "watch":
                found, _, held = self._look(row)
                decision, reason = self._decide(row, found, held)
                due, text = decision != "wait", f"{decision}: {reason}"
            case "promote":
                text = f"deploy version {row.candidate} to everybody, retire {row.base}"
            case "roll_back":
                text = f"give everybody version {row.base}, and {row.candidate} to nobody"
        return Edge(row.number, row.state, due, text)

    def _take(self, row: Row) -> bool:
        return getattr(self, f"_{row.state}")(row)

    def _edge(self, row: Row, after: str, reason: str, **others: Any) -> bool:
        """Takes an edge, as ``Ledger.edge``, and tells of it."""
        self._ledger.edge(row, after, self._clock(), reason, **others)
        self._tell(Notice(row.number, row.state, after, reason))
        return True

    def _wait(self, row: Row, reason: str) -> bool:
        """Tells what is waited for; takes no edge."""
        self._tell(Notice(row.number, row.state, None, reason))
        return False

    # The states. Each returns whether an edge was taken.

    def _collect(self, row: Row) -> bool:
        self._parts.store.expire(row.number, self._clock())
        selection, due, text = self._collectable(row)
        if not due or selection is None:
            return self._wait(row, text)
        # Marked first: whoever is killed here finds the selection as used by this cycle, and goes
        # on with it. The other way round a cycle would train on what it does not own.
        self._parts.store.mark_used(row.number, selection)
        candidate = max(self._ledger.tree()) + 1
        return self._edge(
            row,
            "train",
            text,
            changes={
                "candidate": candidate,
                "watermark": selection.watermark,
                "digest": selection.digest,
                "answers": len(selection.ids),
                "sessions": selection.sessions,
                "outside": selection.outside,
            },
            new_version=candidate,
        )

    def _train(self, row: Row) -> bool:
        selection, after, reason = self._trainable(row)
        if selection is None or after == "refused":
            refused = [(row.candidate, "refused")]
            return self._edge(row, "refused", reason, versions=refused)
        if after == "train":
            # A trainer makes anew what it made of another selection.
            changes = {"digest": selection.digest, "answers": len(selection.ids)}
            return self._edge(row, "train", reason, changes=changes)
        try:
            ways = row.number, row.base, row.candidate, selection, self._behind(row)
            updates = self._parts.trainer.train(*ways)
        except TrainingFailed as error:
            refused = [(row.candidate, "refused")]
            return self._edge(row, "refused", str(error), versions=refused)
        reason = f"version {row.candidate} is trained"
        trained = [(row.candidate, "candidate")]
        return self._edge(row, "gate", reason, versions=trained, updates=updates)

    def _gate(self, row: Row) -> bool:
        versions = (row.candidate, row.base, self._config.anchor)
        played = [self._parts.suites.play(version) for version in versions]
        verdict = gate.judge(self._config.gate, *played)
        return self._edge(
            row,
            "deploy" if verdict.passed else "refused",
            verdict.reason,
            changes={"verdict": finite(dataclasses.asdict(verdict))},
            versions=[] if verdict.passed else [(row.candidate, "refused")],
        )

    def _deploy(self, row: Row) -> bool:
        # the fleet follows the state: the candidate is served already
        now = self._clock()
        share = 100 * self._config.watch.share
        reason = f"version {row.candidate} serves {share:g} % of users"
        return self._edge(row, "watch", reason, changes={"watched_from": now})

    def _watch(self, row: Row) -> bool:
        found, alarms, held = self._look(row)
        for alarm in alarms:
            self._ledger.raise_alarm(
                row.number, alarm.monitor, self._clock(), alarm.text, alarm.sessions
            )
        as_json = found.as_json() | {"held_by": held}
        self._ledger.note_look(row, as_json)
        decision, reason = self._decide(row, found, held)
        if decision == "wait":
            return self._wait(row, reason)
        return self._edge(row, decision, reason, changes={"look": as_json})

    def _promote(self, row: Row) -> bool:
        reason = f"version {row.candidate} is deployed"
        states = [(row.base, "retired"), (row.candidate, "deployed")]
        return self._edge(row, "promoted", reason, versions=states)

    def _roll_back(self, row: Row) -> bool:
        reason = f"everybody has version {row.base} again"
        states = [(row.candidate, "rolled_back")]
        return self._edge(row, "rolled_back", reason, versions=states)

    def _follow(self, row: Row) -> None:
        """Makes the fleet serve what the state says."""
        self._parts.fleet.apply(desired(row, self._config))

    def _collectable(self, row: Row) -> tuple[Selection | None, bool, str]:
        """Return the answers to train on, True if training is due, and the reason."""
        kept = self._parts.store.used(row.number)
        if kept is not None:  # of a process that was killed after it had marked them
            return kept, True, f"train on {len(kept.ids)} answers that were marked before"
        now = self._clock()
        left_s = row.began_at + self._config.cadence_s - now
        if left_s > 0:
            return None, False, f"wait {left_s:.0f} s until the next cycle may train"
        window, size = self._config.window, self._parts.update_size
        most = self._config.batch or window * size
        # those of the cycle: the answers are as old at its last update as they ever are
        updates = -(-most // size) if size else 1
        near = [v for v, n in self._behind(row).items() if n + updates <= window]
        selection = self._parts.store.select(now, near, most)
        text = (
            f"{len(selection.ids)} answers of {selection.sessions} sessions, "
            f"{selection.outside} of versions outside the window left out"
        )
        if selection.waiting:
            text += f", {selection.waiting} wait for what people do with them"
        if selection.sessions < self._config.least_sessions:
            return selection, False, f"wait for {self._config.least_sessions} sessions: {text}"
        return selection, True, f"train on {text}"

    def _behind(self, row: Row) -> dict[int, int]:
        """Version -> updates between it and the base, of those where this is known."""
        tree = self._ledger.tree()
        found = {version: distance(tree, row.base, version) for version in tree}
        return {version: updates for version, updates in found.items() if updates is not None}

    def _trainable(self, row: Row) -> tuple[Selection | None, str, str]:
        """Return the answers to train on, the edge instead of training ("" if none), and the
        reason.
        """
        selection = self._parts.store.used(row.number)
        if selection is None or not selection.ids:
            why = "nothing of its selection is left: its people took their data back"
            return None, "refused", why
        count = len(selection.ids)
        if (selection.digest, count) != (row.digest, row.answers):
            return selection, "train", f"data was taken back: {row.answers} answers, now {count}"
        return selection, "", f"train version {row.candidate} from {row.base} on {count} answers"

    def _look(self, row: Row) -> tuple[watching.Look, list[monitors.Alarm], list[str]]:
        """The test so far, what monitors say, and whose alarms hold a promotion back."""
        versions = (row.base, row.candidate)
        sessions = self._parts.store.sessions(versions, row.watched_from)
        deployed = sessions.of(row.base)
        candidate = sessions.of(row.candidate)
        watched_s = self._clock() - row.watched_from
        found = watching.look(self._config.watch, deployed, candidate, watched_s)
        alarms = monitors.alarms(self._config.monitors, deployed, candidate)
        unknown = monitors.unknown(self._config.monitors, deployed, candidate)
        if unknown and found.decision == "promote":
            reason = f"{found.reason}; monitors could say nothing of {', '.join(unknown)}"
            found = dataclasses.replace(found, reason=reason)
        # monitor -> whether its alarm was acknowledged; new ones were not
        known = {one.monitor: False for one in alarms} | self._ledger.alarms(row.number)
        return found, alarms, sorted(name for name, seen in known.items() if not seen)

    def _decide(self, row: Row, found: watching.Look, held: Sequence[str]) -> tuple[str, str]:
        """Decision by the test and the alarms together, and its reason."""
        if found.decision != "promote" or not held:
            return found.decision, found.reason
        names = ", ".join(held)
        if not found.over:
            return "wait", f"held by {names}; {found.reason}"
        return "roll_back", f"alarms that nobody acknowledged: {names}"


def check_names(config: CycleConfig, parts: Parts) -> None:
    """Raises ConfigError for bounds of metrics and rates that the parts never say, all at once.
    They would be noticed after a candidate has been trained, or never.
    """
    rates = {f"gate.rates[{i}].rate": one.rate for i, one in enumerate(config.gate.rates)}
    metrics = {"watch.metric": config.watch.metric}
    guardrails, watched = config.watch.guardrails, config.monitors
    metrics |= {f"watch.guardrails[{i}].metric": one.metric for i, one in enumerate(guardrails)}
    metrics |= {f"monitors.rates[{i}].metric": one.metric for i, one in enumerate(watched.rates)}
    if watched.reward is not None:
        metrics |= {"monitors.reward": watched.reward, "monitors.retention": watched.retention}
    wrong = []
    for what, names, known in (
        ("metrics of sessions", metrics, parts.metrics),
        ("rates of suites", rates, parts.rates),
    ):
        paths = [path for path, name in names.items() if known is not None and name not in known]
        if paths:
            said = ", ".join(f"config.cycle.{path}={names[path]!r}" for path in paths)
            wrong.append(f"{said}: {what} are {', '.join(sorted(known or ()))}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def check_batch(config: CycleConfig, parts: Parts) -> None:
    """Raises ConfigError for a batch whose last update would be on answers that are too old, and
    for one that can never hold as many sessions as a cycle waits for.
    """
    size, window = parts.update_size, config.window
    if 0 < config.batch < config.least_sessions:
        raise ConfigError(
            f"config.cycle.batch={config.batch} answers are never of "
            f"config.cycle.least_sessions={config.least_sessions} sessions, which have an answer "
            "or more each: lower least_sessions or raise batch"
        )
    if size and config.batch > window * size:
        updates = -(-config.batch // size)
        raise ConfigError(
            f"config.cycle.batch={config.batch} answers are {updates} updates of {size} "
            "(config.parts.run.train: tasks_per_step x group_size), and config.cycle.window="
            f"{window} allows {window}: lower batch, raise window, or put more into an update"
        )


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Passes over what a step may meet through no fault of its own. Whoever was overtaken, or lost
    the database and does not know whether the edge was taken, waits and reads what is so then.
    """
    try:
        yield
    except Overtaken:
        pass
    except SQLAlchemyError as error:
        if not database.is_away(error):
            raise
        logging.warning("the database does not answer: %s", error)


def desired(row: Row, config: CycleConfig) -> Routing:
    """Routing that the fleet should have in the state of a cycle."""
    always = Routing(
        row.base,
        turn=(row.number, row.edges),
        control=config.anchor if config.control_share else None,
        control_share=config.control_share,
    )
    match row.state:
        case "deploy" | "watch":
            name, share = f"cycle-{row.number}", config.watch.share
            return dataclasses.replace(
                always, candidate=row.candidate, share=share, experiment=name
            )
        case "promote":
            return dataclasses.replace(always, deployed=row.candidate)
    return always
