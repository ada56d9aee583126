"""The fleet that serves weights of a run, on the run's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from models.transformer import Transformer
from people.feedback.records import AnswerRecord
from people.serving.begun import Begun
from people.serving.fleet import Fleet
from people.serving.service import Service
from rl_code.config.read_config import ConfigError
from rl_code.rollout.disk_pages import DiskPages
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import DOCUMENTS


def make_engine(run: Run) -> Engine:
    """The engine as the run samples, but for prompts of any length that fits: a conversation may
    come whole in one request.
    """
    rollout = run.config.rollout
    shapes = dataclasses.replace(rollout.engine, prompt_length=rollout.engine.length)
    way = run.config.protocol, rollout.dtype, run.rollout_mesh
    return run.engine(rollout.sampling, shapes, *way)


def make_scheduler(run: Run, engine: Engine, disk: DiskPages | None = None) -> Scheduler:
    """A scheduler of its own on an engine that others use too. disk: as of ``Scheduler``."""
    rollout = run.config.rollout
    threads = dict(workers=rollout.workers, worker_deadline_s=rollout.worker_deadline_s)
    return Scheduler(engine, run.tokenizer, **threads, disk=disk)


def open_files(config: RunConfig, workdir: Path) -> DiskPages | None:
    """The files of the keys of documents; None for a config without. Raises ConfigError."""
    megabytes, days = config.serving.documents_mb, config.serving.documents_days
    if megabytes is None:
        return None
    try:
        return DiskPages(workdir / DOCUMENTS, megabytes * 2**20, days * 86_400.0)
    except OSError as error:
        raise ConfigError(f"serving.documents_mb={megabytes}: {error}") from error


def make_fleet(
    run: Run,
    secret: bytes,
    on_answer: Callable[[AnswerRecord], Future | None],
    engine: Engine | None = None,
    begun: Begun | None = None,
) -> Fleet:
    """Make a fleet that serves weights of a run; none are loaded yet. Every version has a scheduler
    of its own, and all have the same compiled programs.

    on_answer, begun: as of ``Fleet``. engine: None for a new one (``make_engine``).
    """
    engine = engine or make_engine(run)
    disk = open_files(run.config, run.workdir)
    protocol = run.wording.protocol()

    def service(weights: Transformer, version: int) -> Service:
        scheduler = make_scheduler(run, engine, disk)
        return Service(scheduler, run.sampler(weights), version=version, protocol=protocol)

    return Fleet(
        service,
        protocol=protocol,
        tokenizer=run.tokenizer,
        secret=secret,
        config=run.config.serving,
        on_answer=on_answer,
        begun=begun,
        documents=run.config.documents,
        document_tools=[name for name, tool in run.tools.items() if tool.documents],
    )
