"""Tokens per second of the server beside those of the engine alone, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import sqlalchemy
from sqlalchemy import select

from experiments.load.audit import read_journal
from experiments.load.bare import Bare
from experiments.load.clients import Clients
from people.feedback.tables import ANSWERS
from people.realtime.versions import Versions
from people.serving.of_run import make_engine, make_scheduler
from rl_code.host.stop import StopRequest
from rl_code.run.config import RunConfig
from rl_code.run.run import Run

# Prompts that the engine alone is given, again and again.
_PROMPTS = 2_000


class Beside:
    """The run of a served model once more, in a folder of its own. A context manager.

    folder: the workdir of the server, whose version ``first`` exists.
    """

    def __init__(self, config: RunConfig, folder: Path, first: int):
        self._ends = contextlib.ExitStack()
        own = folder / "beside"
        own.mkdir(exist_ok=True)
        for name in ("model", "versions"):
            shutil.copytree(folder / name, own / name, dirs_exist_ok=True)
        self.run = self._ends.enter_context(Run(config, own))
        self._first = first

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def measure(self, served: Callable[[], dict[str, float]], bare: Bare, plan: InTurns) -> dict:
        """A pair of rates a round, and their ratios: tokens per second, of answers that ended in
        time; and all sampled tokens, of answers that were cut off too, per second of processor time
        of the server's process and of this one. The latter tells what serving adds, whatever else
        the machine does. The time of the clients, of the database's own processes and of the audit
        is in neither; that of the server has what it did for reports, for requests that it refused
        and for the cycle.

        served: ``Served.measure`` of the same plan.
        """
        found = []
        with jax.set_mesh(self.run.mesh):
            # compiles; not counted
            bare.run(plan.share_s, plan.max_tokens)
            for number in range(plan.rounds):
                pair = served()
                begin_s = time.process_time()
                sampled = bare.run(plan.share_s, plan.max_tokens)
                pair["bare"] = sampled.whole / sampled.seconds
                pair["bare_per_cpu_s"] = sampled.all / (time.process_time() - begin_s)
                found.append(pair)
                plan.say(f"round {number + 1}: {pair['served']:.0f} of {pair['bare']:.0f} tokens/s")
        return {
            "rounds": found,
            "ratio": statistics.median(one["served"] / one["bare"] for one in found),
            "ratio_per_cpu_s": statistics.median(
                one["served_per_cpu_s"] / one["bare_per_cpu_s"] for one in found
            ),
        }

    def bare(self, prompts: Sequence[Sequence[int]], clients: int) -> Bare:
        """The engine alone with the weights of the first version."""
        with jax.set_mesh(self.run.mesh):
            scheduler = make_scheduler(self.run, make_engine(self.run))
            self._ends.callback(scheduler.close)
            weights = self.run.sampler(Versions(self.run, StopRequest()).model(self._first))
            scheduler.load(weights, version=self._first)
        return Bare(scheduler, self.run.wording.protocol(), [list(one) for one in prompts], clients)


@dataclasses.dataclass(frozen=True)
class InTurns:
    """Settings with which server and engine are measured in turns."""

    rounds: int
    # Seconds of each turn.
    share_s: float
    max_tokens: int
    say: Callable[[str], None]


class Served:
    """Results of the clients' requests.

    journal: theirs. recorded: where the server records answers. server_cpu_s: seconds of processor
    time that the server's process has taken.
    """

    def __init__(
        self,
        clients: Clients,
        journal: Path,
        recorded: sqlalchemy.Engine,
        server_cpu_s: Callable[[], float],
    ):
        self._clients, self._journal, self._server_cpu_s = clients, journal, server_cpu_s
        self._recorded = recorded

    def measure(self, share_s: float) -> dict[str, float]:
        """Tokens per second that came to clients within the time; all that was recorded per second
        of the server's processor time, until the last answer; and the share of a processor that the
        clients took.
        """
        clients = self._clients
        clients_s, server_s = clients.cpu_s, self._server_cpu_s()
        before = self._sampled()
        begin = time.time()
        clients.go()
        time.sleep(share_s)
        end = time.time()
        clients.rest()
        last = time.time()
        told = [one for one in read_journal(self._journal).answers.values() if one["at"] >= begin]
        server_s = self._server_cpu_s() - server_s
        return {
            "served": sum(one["tokens"] for one in told if one["at"] <= end) / (end - begin),
            "served_per_cpu_s": (self._sampled() - before) / server_s,
            "clients_cpu": (clients.cpu_s - clients_s) / (last - begin),
        }

    def _sampled(self) -> int:
        """Tokens of all answers that are recorded."""
        with self._recorded.connect() as connection:
            return sum(len(one) for one in connection.scalars(select(ANSWERS.c.tokens)))


def measure(
    beside: Beside, served: Served, engine: sqlalchemy.Engine, clients: int, plan: InTurns
) -> dict[str, Any]:
    """``Beside.measure`` with the requests that the clients make at first, which are not counted
    themselves: connections are made and programs compiled. Empty without a round.
    """
    if not plan.rounds:
        return {}
    served.measure(plan.share_s)
    with engine.connect() as connection:
        prompts = connection.scalars(select(ANSWERS.c.given).limit(_PROMPTS)).all()
    if not prompts:
        raise RuntimeError(f"no answer came within {plan.share_s:g} s")
    bare = beside.bare(prompts, clients)
    return beside.measure(lambda: served.measure(plan.share_s), bare, plan)
