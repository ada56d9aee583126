"""Many clients use the program of launch.realtime while its parts are killed; then it is audited.

    python -m experiments.load --config=configs/realtime.py:smoke --workdir=runs/load \\
        --clients=200 --seconds=600 --server_kills=3 --trainer_kills=3 --database_kills=3
    python -m experiments.load --config=configs/realtime.py:smoke --workdir=runs/kills \\
        --clients=8 --seconds=0 --anytime_kills=30 --rounds=0 --database=sqlite

    python -m experiments.load --config=configs/realtime_agent.py:smoke --workdir=runs/agent \\
        --clients=6 --seconds=0 --anytime_kills=30 --rounds=0 --database=sqlite

Where the config has people of an agent (parts.agents), the clients are those, with their habits,
tools and wants; else programmers who ask for suggestions.

At first it measures, side by side: the clients ask for --share_s seconds, the engine alone answers
the same requests for as long, --rounds times. Then the clients ask for --seconds and until the last
kill was made, and parts are killed by SIGKILL and started again: the program while it serves
(--server_kills), while it trains (--trainer_kills; it is one process), at any moment of its life,
starting included (--anytime_kills), and PostgreSQL (--database_kills). It goes on until
--cycles_after cycles more have ended. In the end every answer and event that was acknowledged to a
client must be in the database once and as it was told, no answer trained on twice, none skipped,
and never two versions deployed. load.json in the workdir has all numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import signal
import time
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags
from sqlalchemy.exc import SQLAlchemyError

from experiments.load import beside as beside_lib
from experiments.load import postgres, report
from experiments.load.audit import Audit, Messages, Texts, check_cycles, check_record, read_journal
from experiments.load.clients import Clients, Task
from experiments.load.program import Program, ProgramEnded
from experiments.load.strikes import KINDS, Strikes
from launch import flags
from launch.realtime import RealtimeConfig, database_of
from people.realtime import tables
from people.realtime.api import PARTS
from people.realtime.ledger import Ledger
from people.realtime.served import Served
from people.realtime.tables import CYCLES
from people.simulated.own_tools import OwnTools
from rl_code.config import named, read_config
from rl_code.config.read_config import ConfigError
from rl_code.environment.tools.api import find_tools
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.host.files import write_atomically
from rl_code.run.run import Run

FLAGS = absl_flags.FLAGS
# Seconds that the program may take to start: a warm start, and programs to compile.
_START_S = 3_600.0
# A cadence that no run reaches, so that nothing is trained while it is measured.
_NEVER_S = 1e9


class LoadError(RuntimeError):
    """A check failed."""


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    realtime = read_config.build(RealtimeConfig, config)
    served = named.make(PARTS, realtime.parts, "config.parts")
    if not isinstance(served, Served):
        raise ConfigError(f"config.parts={realtime.parts.name!r} serves nobody")
    if served.agents is not None and FLAGS.rounds:
        raise ConfigError(
            f"--rounds={FLAGS.rounds}: these clients work with an agent, and the engine alone is "
            "measured by suggestions; take --rounds=0"
        )
    folder = Path(workdir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "clients.jsonl"
    if journal.exists():
        raise ConfigError(f"{journal} is there: a load begins in a workdir without one")
    # what was started ends with this program, however it is stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = random.randrange(1 << 32) if FLAGS.strike_seed is None else FLAGS.strike_seed
    counts = {kind: getattr(FLAGS, f"{kind}_kills") for kind in KINDS}
    print(f"{counts}, --strike_seed={seed}", flush=True)
    with contextlib.ExitStack() as stack:
        database = _database(stack, counts)
        url = database.url if database else database_of(realtime, folder)
        path = config_flags.get_config_filename(FLAGS["config"])
        command = [f"--config={path}", *flags.overrides()]
        # the clients are started here, and are not killed
        command += [f"--config.parts.{'agents' if served.agents else 'people'}=None"]
        command += [f"--config.database={url}", f"--workdir={folder}"]
        program = stack.enter_context(Program(folder))
        program.start([*command, f"--config.cycle.cadence_s={_NEVER_S}"])
        program.wait_ready(_START_S)
        ledger = Ledger(tables.connect(url))
        agents = json.loads(read_config.to_json(served.agents)) if served.agents else None
        task = Task(program.url, str(journal), FLAGS.clients, seed, FLAGS.max_tokens, agents)
        clients = stack.enter_context(Clients(task))
        found = {"seed": seed, "flags": _flags(), "database": url.partition(":")[0]}
        beside = stack.enter_context(beside_lib.Beside(served.run, folder, realtime.cycle.anchor))
        plan = beside_lib.InTurns(FLAGS.rounds, FLAGS.share_s, FLAGS.max_tokens, _say)
        asking = beside_lib.Served(clients, journal, ledger.engine, lambda: program.cpu_s)
        ways = ledger.engine, FLAGS.clients, plan
        found["beside"] = beside_lib.measure(beside, asking, *ways)
        program.end()
        program.start(command)
        program.wait_ready(_START_S)
        rng = random.Random(seed)
        ways = FLAGS.seconds, FLAGS.within_s, rng, program, ledger, database, _say
        strikes = Strikes(counts, *ways)
        found |= _load(program, clients, ledger, strikes)
        told = read_journal(journal)
        audit = Audit()
        check_record(audit, ledger.engine, told, _texts(served, beside.run))
        train, cycle = served.run.train, realtime.cycle
        batch = cycle.batch or cycle.window * train.tasks_per_step * train.group_size
        control = cycle.anchor if cycle.control_share else None
        ways = batch, served.feedback.wait, control
        check_cycles(audit, ledger.engine, folder / "versions", *ways)
        audit.none("looks that found not one deployed version", set(strikes.looks) - {1})
        if strikes.left:
            audit.problems.append(f"{strikes.left} kills were not made")
        found |= report.measured(told, program.lives, found["span"])
        found["audit"] = dataclasses.asdict(audit)
    write_atomically(folder / "load.json", json.dumps(found, indent=1).encode())
    flags.console().print(report.table(found))
    if audit.problems:
        raise LoadError("; ".join(audit.problems))
    print("every check passed")


def _texts(served: Served, run: Run) -> Texts | Messages:
    """Comparison of the text that clients got with recorded tokens."""
    if served.agents is None:
        return Texts(run.tokenizer, run.wording.stop_ids())
    tools = OwnTools(find_tools(served.agents.tools, "config.parts.agents.tools"))
    return Messages(ChatText(run.wording.protocol(), run.tokenizer), tools.schemas)


def _database(stack: contextlib.ExitStack, counts: dict[str, int]) -> postgres.Server | None:
    """A PostgreSQL server, or None for SQLite. Raises ConfigError."""
    why = postgres.why_not()
    if FLAGS.database == "sqlite" or (FLAGS.database == "auto" and why):
        if counts["database"]:
            reason = why or "--database=sqlite"
            raise ConfigError(
                f"--database_kills={counts['database']}: SQLite is part of the program, and is "
                f"killed with it ({reason})"
            )
        return None
    if why:
        raise ConfigError(f"--database=postgresql: {why}")
    return stack.enter_context(postgres.server())


def _load(program: Program, clients: Clients, ledger: Ledger, strikes: Strikes) -> dict:
    """The clients ask while parts are killed; what was done, and when."""
    begin, since = time.time(), program.seconds
    clients.go()
    end = time.monotonic() + FLAGS.seconds
    last = time.monotonic() + 60 * FLAGS.minutes
    wanted: int | None = None

    def over() -> bool:
        nonlocal wanted
        now = time.monotonic()
        if now > last:
            _say(f"gives up after {FLAGS.minutes} minutes")
            return True
        if now < end or strikes.left or not program.ready:
            return False
        with contextlib.suppress(SQLAlchemyError):
            cycle = ledger.current().number
            wanted = cycle + FLAGS.cycles_after if wanted is None else wanted
            return cycle >= wanted
        return False

    strikes.run(over)
    span = (begin, time.time())
    clients.rest()
    code = program.end()
    return {
        "strikes": strikes.log,
        "deployed_looks": dict(strikes.looks),
        "span": span,
        "since_s": since,
        "clients_cpu_s": clients.cpu_s,
        "exit_code": code,
        "cycles": len(ledger.rows(CYCLES)),
    }


def _flags() -> dict:
    names = ("clients", "seconds", "rounds", "share_s", "max_tokens", "within_s", "cycles_after")
    return {name: getattr(FLAGS, name) for name in names}


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    whole, number, words = (
        absl_flags.DEFINE_integer,
        absl_flags.DEFINE_float,
        absl_flags.DEFINE_enum,
    )
    whole("clients", 16, "How many ask at once.", 1)
    number("seconds", 60.0, "How long they ask under kills, at least.", 0.0)
    for kind in KINDS:
        whole(f"{kind}_kills", 0, f"Kills of the kind {kind}.", 0)
    number("within_s", 30.0, "A kill at any moment comes so long after a start, at most.", 0.0)
    whole("cycles_after", 0, "Cycles that must still end after the last kill.", 0)
    words("database", "auto", ["auto", "sqlite", "postgresql"], "auto: PostgreSQL where it is.")
    whole("rounds", 2, "Times that clients and the engine alone are measured in turn.", 0)
    number("share_s", 15.0, "Seconds of each.", 0.1)
    whole("max_tokens", 24, "Tokens of an answer, at most.", 1)
    whole("strike_seed", None, "Of the moments and the victims; random by default.")
    whole("minutes", 60, "Gives up after so many.", 1)


if __name__ == "__main__":
    define_flags()
    flags.run(main, kind=RealtimeConfig, expected=(LoadError, ProgramEnded))
