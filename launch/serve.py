"""Serves the weights of a run by the OpenAI chat API, on this machine.

    python -m launch.serve --config=configs/own_model.py --workdir=runs/own --port=8000
    curl http://127.0.0.1:8000/v1/chat/completions -d \\
        '{"messages": [{"role": "user", "content": "hello"}]}'

Without --workdir the weights that a run of the config starts from. It samples as the config says
(rollout.sampling); Ctrl-C ends it. Every answer is written to --record before its client gets it:
ids, log-probabilities and version of the weights, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
import ml_collections
from absl import flags as absl_flags

from launch import flags
from launch.evaluate import START, restore_model
from launch.step import STEP
from rl_code import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.read_config import ConfigError
from rl_code.run import Run
from rl_code.run_config import RunConfig, meshes
from rl_code.serving.endpoint import Endpoint
from rl_code.serving.service import Service

PORT = absl_flags.DEFINE_integer("port", 8000, "Port; 0 for any that is free.")
LISTEN = absl_flags.DEFINE_string("listen", "127.0.0.1", "Address to listen on.")
NAME = absl_flags.DEFINE_string("served_as", "policy", "The name of the model.")
RECORD = absl_flags.DEFINE_string("record", None, "File to which answers are appended.")


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    flags.use_virtual_devices(*meshes(run_config))
    with contextlib.ExitStack() as stack:
        folder = Path(workdir or stack.enter_context(tempfile.TemporaryDirectory()))
        run = stack.enter_context(Run(run_config, folder))
        stack.enter_context(jax.set_mesh(run.mesh))
        service = stack.enter_context(serve(run, workdir, STEP.value, RECORD.value))
        try:
            made = Endpoint(service.find, host=LISTEN.value, port=PORT.value)
        except OSError as error:
            raise ConfigError(f"--listen={LISTEN.value} --port={PORT.value}: {error}") from error
        endpoint = stack.enter_context(made)
        flags.console().print(f"{NAME.value} on {endpoint.url}/v1", soft_wrap=True)
        threading.Event().wait()


def serve(run: Run, workdir: str | None, step: int | None, record: str | None) -> Service:
    """What answers requests with the weights of a workdir, or with the run's initial ones.

    Raises ConfigError for a protocol that has no place for conversations.
    """
    protocol = run.protocol
    if not protocol.converses:
        raise ConfigError(
            f"config.protocol = {run.config.protocol.name!r} has no place for conversations; take "
            "a chat, such as 'hermes', or 'compact'"
        )
    model, _, step = (
        (run.init_model(), START, 0) if workdir is None else restore_model(run, workdir, step)
    )
    rollout = run.config.rollout
    # a conversation may come whole in one request
    engine = dataclasses.replace(rollout.engine, prompt_length=rollout.engine.length)
    return Service(
        run.scheduler(rollout.sampling, engine),
        run.sampler(model),
        model=NAME.value,
        version=step,
        protocol=protocol,
        tokenizer=run.tokenizer,
        on_answer=_recorder(record),
    )


def _recorder(path: str | None):
    """Appends answers to a file, each forced to the disk."""
    if path is None:
        return lambda record: None
    file = open(path, "a", encoding="utf-8")
    lock = threading.Lock()

    def write(record: dict[str, Any]) -> None:
        with lock:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return write


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, needs_workdir=False, expected=(SandboxUnavailable,))
