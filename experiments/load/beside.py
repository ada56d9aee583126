"""Tokens per second of the server beside those of the engine alone, in turns."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import sqlalchemy
from sqlalchemy import select

from experiments.load.audit import read_journal
from experiments.load.bare import Bare
from experiments.load.clients import Clients
from rl_code.feedback.tables import ANSWERS
from rl_code.realtime.versions import Versions
from rl_code.run import Run
from rl_code.run_config import RunConfig
from rl_code.serving.of_run import make_engine, make_scheduler

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

    def measure(
        self,
        clients: Clients,
        journal: Path,
        engine: sqlalchemy.Engine,
        rounds: int,
        share_s: float,
        max_tokens: int,
        say: Callable[[str], None],
    ) -> dict[str, Any]:
        """A pair of rates a round, of answers that ended within the time, and their ratios.

        The first share of each is not counted: programs are compiled and connections made. The
        requests of the engine alone are those that the clients have made.
        """
        if not rounds:
            return {}
        self._serve(clients, journal, share_s)
        with engine.connect() as connection:
            prompts = connection.scalars(select(ANSWERS.c.given).limit(_PROMPTS)).all()
        if not prompts:
            raise RuntimeError(f"no answer came within {share_s:g} s")
        found = []
        with jax.set_mesh(self.run.mesh):
            scheduler = make_scheduler(self.run, make_engine(self.run))
            self._ends.callback(scheduler.close)
            scheduler.load(
                self.run.sampler(Versions(self.run).model(self._first)), version=self._first
            )
            bare = Bare(scheduler, self.run.protocol, [list(one) for one in prompts], clients.count)
            bare.run(share_s, max_tokens)
            for number in range(rounds):
                served, cpu_s = self._serve(clients, journal, share_s)
                tokens, taken_s = bare.run(share_s, max_tokens)
                pair = {"served": served, "bare": tokens / taken_s, "clients_cpu": cpu_s}
                found.append(pair)
                say(f"round {number + 1}: {served:.0f} tokens/s served, {pair['bare']:.0f} alone")
        ratios = [one["served"] / one["bare"] for one in found]
        return {"rounds": found, "ratio": statistics.median(ratios)}

    def _serve(self, clients: Clients, journal: Path, share_s: float) -> tuple[float, float]:
        """Tokens per second that came to clients, and the share of a processor that they took."""
        before = clients.cpu_s
        begin = time.time()
        clients.go()
        time.sleep(share_s)
        end = time.time()
        clients.rest()
        told = read_journal(journal).answers.values()
        tokens = sum(one["tokens"] for one in told if begin <= one["at"] <= end)
        return tokens / (end - begin), (clients.cpu_s - before) / (time.time() - begin)
