"""Runs the cycle: collect what people did, train, gate, deploy to a share, watch, promote or roll
back.

    python -m launch.realtime --config=configs/realtime.py --workdir=runs/realtime
    python -m launch.realtime --config=configs/realtime.py --workdir=runs/realtime --dry_run

--dry_run prints what the next edge would do, and does nothing. --cycles ends after so many cycles,
counted from the first of the workdir; 0 goes on until it is stopped. --port serves the page
(/dashboard) meanwhile, and the API where the parts serve people (configs/realtime.py); these
serve on any free port without it. With --stay both go on after the last cycle until they are
stopped; for a workdir whose cycles have ended already it serves the page alone.

--truth is the file in which simulated people of an agent write down how content they truly are
(WORKDIR/people.truth.jsonl of a run with config.parts.agents); the page then shows how the reward
follows it. Nothing else reads it.

--keys is a file of API keys and their limits, as of launch.serve; without one everybody may ask,
and read the page. Who has the key in the environment variable RL_CODE_ADMIN_KEY may roll back and
acknowledge alarms there. A run that was stopped or killed goes on with the same command. Ctrl-C and
SIGTERM have it refuse new requests at once, end the update or episode that it is at, and wait for
the answers on their way; another one ends it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import ml_collections
import rich.console
import rich.table
import sqlalchemy
from absl import flags as absl_flags
from sqlalchemy import Row

from launch import flags
from people.feedback import database
from people.realtime import tables
from people.realtime.api import PARTS
from people.realtime.cycle import Cycle, CycleConfig, Notice
from people.realtime.dashboard import Dashboard
from people.realtime.ledger import Ledger
from people.realtime.parts import Parts
from people.realtime.satisfaction import Curve
from people.realtime.tables import CYCLES, EDGES
from people.serving.access import KeyFile
from rl_code.config import named, read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.host.files import lock
from rl_code.host.stop import StopRequest

ADMIN_KEY = "RL_CODE_ADMIN_KEY"
# Seconds between two looks whether it is to end.
_LOOK_S = 0.2


@dataclasses.dataclass(frozen=True)
class RealtimeConfig:
    """A cycle, and what it is made of."""

    # The store, the trainer, the fleet and the suites: a key of ``realtime.api.PARTS``.
    parts: Named
    cycle: CycleConfig = dataclasses.field(default_factory=CycleConfig)
    # The database, by URL; None for a file of SQLite in the workdir.
    database: str | None = None


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    realtime = read_config.build(RealtimeConfig, config)
    folder = Path(workdir)
    if absl_flags.FLAGS.dry_run:
        print(dry_run(realtime, folder))
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock(folder / "realtime.lock")
    except OSError as error:
        raise ConfigError(f"{folder}: another process runs the cycle of this workdir") from error
    console = flags.console()
    cycle, ledger, parts = open_cycle(realtime, folder, Lines(console))
    own = absl_flags.FLAGS
    if own.stay and own.port is None:
        raise ConfigError("--stay needs --port")
    ended = bool(own.cycles) and ledger.current().number > own.cycles
    if ended:
        # nothing is loaded for cycles that have ended
        parts = dataclasses.replace(parts, serve=None)
        console.print(f"cycle {own.cycles} has ended; a greater --cycles goes on")
        if not own.stay:
            console.print(table(ledger))
            return
    keys = KeyFile(own.keys) if own.keys else None
    may_read = None if keys is None else keys.is_admin
    admin_key = os.environ.get(ADMIN_KEY)  # refused where it can be guessed
    ways = dict(may_read=may_read, truth=truth_of(own.truth, parts, realtime.cycle.anchor))
    board = Dashboard(ledger, parts.store, realtime.cycle, admin_key, **ways)
    page = served(parts, board, own.port, console, keys)
    with StopRequest(parts.stop) as stop, page, stop.deferred():
        if not ended:
            cycle.run(own.cycles or None, lambda: stop.requested)
        console.print(table(ledger))
        while own.stay and not stop.requested:
            time.sleep(_LOOK_S)


def truth_of(path: str | None, parts: Parts, anchor: int) -> Curve | None:
    """The curve of the page; None without a file. Raises ConfigError for a file that cannot be, and
    for parts that record no answers.
    """
    if path is None:
        return None
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(
            f"--truth={path}: expected the file in which simulated people write how content they "
            "are, such as WORKDIR/people.truth.jsonl"
        )
    if parts.rewards is None:
        raise ConfigError(f"--truth={path}: these parts record no answers (config.parts)")
    return Curve(file, parts.rewards, anchor)


class Lines:
    """Prints each edge as it is taken, and from time to time what is waited for."""

    def __init__(self, console: rich.console.Console, every_s: float = 15.0):
        self._console = console
        self._every_s = every_s
        self._next_at = 0.0  # of time.monotonic

    def __call__(self, notice: Notice) -> None:
        if notice.after is None and time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._every_s
        where = notice.before if notice.after is None else f"{notice.before} -> {notice.after}"
        line = f"{time.strftime('%H:%M:%S')}  cycle {notice.cycle}, {where}: {notice.reason}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def open_cycle(
    config: RealtimeConfig, folder: Path, tell: Callable[[Notice], None] = lambda notice: None
):
    """The cycle of a workdir, begun if it is new; its ledger, and its parts."""
    engine = tables.connect(database_of(config, folder))
    parts = parts_of(config, folder, engine)
    ledger = Ledger(engine)
    cycle = Cycle(ledger, parts, config.cycle, tell=tell)  # finds what is wrong with the config
    ledger.start(config.cycle.anchor, time.time())
    return cycle, ledger, parts


def parts_of(config: RealtimeConfig, folder: Path, engine: sqlalchemy.Engine) -> Parts:
    """Parts of the cycle."""
    made = named.make(PARTS, config.parts, "config.parts")
    return made.make(engine, folder, config.cycle, time.time)


def database_of(config: RealtimeConfig, folder: Path) -> str:
    """The URL of the database."""
    return config.database or f"sqlite:///{folder / 'people.db'}"


def dry_run(config: RealtimeConfig, folder: Path) -> str:
    """Preview of the next edge. Nothing is written: a new workdir has nothing to say yet, and
    an older form of the tables stays as it is.
    """
    where = config.database or folder
    new = (
        f"{where} holds no cycle yet: the first deploys version {config.cycle.anchor} and waits "
        f"for {config.cycle.least_sessions} sessions"
    )
    try:
        engine = database.make_engine(database_of(config, folder), new=False)
    except FileNotFoundError:
        return new
    except ValueError as error:
        raise ConfigError(f"config.database: {error}") from error
    ledger = Ledger(engine)
    if not ledger.exists():
        return new
    if not database.is_newest(engine):
        return f"{where} has tables of an older form, which the next start changes first"
    if not folder.is_dir():
        return f"{folder} does not exist, and the cycle of {where} has begun in another workdir"
    plan = Cycle(ledger, parts_of(config, folder, engine), config.cycle).plan()
    return f"cycle {plan.cycle}, {plan.state}: {plan.text}{'' if plan.due else ' (not due)'}"


@contextlib.contextmanager
def served(
    parts: Parts,
    board: Dashboard,
    port: int | None,
    console: rich.console.Console,
    keys: KeyFile | None = None,
) -> Generator[None]:
    """Serves people where the parts do so, and the page beside; of other parts the page alone, and
    nothing without a port. Raises ConfigError.
    """
    if parts.serve is not None:
        with parts.serve(board.routes(), port, keys) as url:
            console.print(f"{url}/v1 and {url}/dashboard", soft_wrap=True)
            yield
        return
    if port is None:
        yield
        return
    try:
        endpoint = Endpoint(lambda key: None, port=port, routes=board.routes())
    except OSError as error:
        raise ConfigError(f"--port={port}: {error}") from error
    with endpoint:
        console.print(f"{endpoint.url}/dashboard", soft_wrap=True)
        yield


def table(ledger: Ledger) -> rich.table.Table:
    """A row for each cycle that has begun."""
    names = ("cycle", "of", "candidate", "answers", "outside the window", "watched", "state", "why")
    view = rich.table.Table(*names)
    edges = ledger.rows(EDGES)
    # of the last decision; the two edges after it only carry it out
    reasons = {one.cycle: one.reason for one in edges if one.before not in ("promote", "roll_back")}
    for row in ledger.rows(CYCLES):
        cells = (row.number, row.base, row.candidate, row.answers, row.outside)
        cells += (watched(row, edges), row.state)
        view.add_row(*("" if one is None else str(one) for one in cells), reasons.get(row.number))
    return view


def watched(row: Row, edges: Sequence[Row]) -> str:
    """Time for which the candidate of a cycle was watched until it was decided about, and in how
    many sessions of the deployed version and of its own; "" for one that was not.
    """
    decided = ("promote", "roll_back")
    ends = [one.at for one in edges if one.cycle == row.number and one.after in decided]
    if not ends or row.watched_from is None or row.look is None:
        return ""
    before, after = row.look["sessions"]
    return f"{ends[-1] - row.watched_from:.0f} s, {before} + {after} sessions"


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    absl_flags.DEFINE_bool("dry_run", False, "Print what the next edge would do; do nothing.")
    absl_flags.DEFINE_integer("cycles", 0, "Cycles after which it ends; 0 for none.", 0)
    absl_flags.DEFINE_integer("port", None, "Port of the page; 0 for any that is free.", 0)
    absl_flags.DEFINE_bool("stay", False, "Go on serving after the last cycle. Needs --port.")
    absl_flags.DEFINE_string("truth", None, "File of simulated people's satisfaction, shown.")
    absl_flags.DEFINE_string("keys", None, "File of API keys; everybody may ask without one.")


if __name__ == "__main__":
    define_flags()
    flags.run(main, kind=RealtimeConfig)
