"""Serves the weights of a run by the OpenAI API, on this machine.

    python -m launch.serve --config=configs/own_model.py --workdir=runs/own --port=8000
    curl http://127.0.0.1:8000/v1/chat/completions -d \\
        '{"messages": [{"role": "user", "content": "hello"}]}'

Without --workdir the weights that a run of the config starts from. It samples as the config says
(rollout.sampling). Every answer is written to --record before its client gets the end of it, a line
of JSON each (``people.feedback.records``). --database keeps them in a store of feedback instead,
or too, and serves the routes by which people and editors (``launch.lsp``) report what became of
them:

    python -m launch.serve --config=configs/tab.py --workdir=runs/tab \\
        --database=sqlite:///runs/tab/people.db --secret=runs/tab/secret

Further checkpoints, adapters, and what the model ``auto`` means are said by --also, --adapter and
--auto (``launch.serve_models``):

    --also=policy@120:runs/tab --adapter=tuned:runs/lora --auto=thompson

--api=tinker adds Tinker's API, by which clients train adapters of the first model (docs/tinker.md).

--keys is a file of API keys and their limits (``people.serving.access``); without one everybody
may ask. SIGTERM and Ctrl-C end it once the answers that are on their way have ended
(serving.drain_s); a second one ends it at once. docs/serving.md has a session with curl.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import jax
import ml_collections
from absl import flags as absl_flags
from absl import logging
from sqlalchemy.exc import SQLAlchemyError

from launch import flags
from launch.serve_models import check_trained, load_adapters, load_also, make_router
from launch.step import STEP
from models.transformer import Transformer
from people.feedback import database
from people.feedback.checks import Claims
from people.feedback.config import FeedbackConfig
from people.feedback.identity import AnswerIds, load_secret
from people.feedback.records import AnswerRecord
from people.feedback.rewards.combine import FeedbackRewardConfig, make_reward
from people.serving.access import Access, KeyFile
from people.serving.begun import Begun
from people.serving.earned import EarningStore
from people.serving.of_run import make_fleet
from people.serving.probes import probes
from people.serving.router import AUTO, Thompson
from people.serving.tinker import of_run
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.host.files import make_private
from rl_code.run.config import RunConfig, meshes
from rl_code.run.run import Run

PORT = absl_flags.DEFINE_integer("port", 8000, "Port; 0 for any that is free.")
LISTEN = absl_flags.DEFINE_string("listen", "127.0.0.1", "Address to listen on.")
NAME = absl_flags.DEFINE_string("served_as", "policy", "The name of the model.")
ALSO = absl_flags.DEFINE_multi_string(
    "also", [], "Another checkpoint to serve, as name@step:workdir or name:workdir; repeatable."
)
ADAPTER = absl_flags.DEFINE_multi_string(
    "adapter", [], "Adapters of the first model, as --also; of a run with model.lora; repeatable."
)
ROUTER = absl_flags.DEFINE_string(
    "auto",
    None,
    "What the model auto means: shares:a@1=0.9,b@2=0.1 of the users, or thompson:a@1,b@2, which "
    "learns from what is reported (--database); thompson alone for all. By default the first.",
)
RECORD = absl_flags.DEFINE_string("record", None, "File to which answers are appended.")
DATABASE = absl_flags.DEFINE_string(
    "database",
    None,
    "URL of the database that keeps answers and what became of them, such as "
    "sqlite:///runs/tab/people.db; without one nothing can be reported. Needs --secret.",
)
KEEP_DAYS = absl_flags.DEFINE_float(
    "keep_days",
    FeedbackConfig.keep_days,
    "Days after which answers and events are removed from --database.",
    lower_bound=0.01,
)
KEYS = absl_flags.DEFINE_string("keys", None, "File of API keys; everybody may ask without one.")
SECRET = absl_flags.DEFINE_string(
    "secret", None, "File of what makes ids and users' keys; made anew for this server without one."
)
API = absl_flags.DEFINE_enum(
    "api",
    "openai",
    ["openai", "tinker"],
    "tinker adds Tinker's API for training adapters of the first model (docs/tinker.md).",
)
TINKER = absl_flags.DEFINE_string(
    "tinker",
    None,
    "Folder of Tinker's API: its requests, results and checkpoints; tinker in the workdir by "
    "default.",
)
# Seconds between two removals of what is too old.
_EXPIRE_S = 3_600.0


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    flags.use_virtual_devices(*meshes(run_config))
    ended = Ended()
    keys = KeyFile(KEYS.value) if KEYS.value else None
    with contextlib.ExitStack() as stack:
        tinker = _tinker_folder(workdir)
        secret_file = SECRET.value
        if tinker is not None and secret_file is None:
            tinker.mkdir(parents=True, exist_ok=True)
            secret_file = str(tinker / "secret")  # its futures outlive the server
        secret = _secret(secret_file)
        write = stack.enter_context(recorder(RECORD.value))
        if (ROUTER.value or "").startswith("thompson") and DATABASE.value is None:
            raise ConfigError(f"--auto={ROUTER.value} needs --database, to hear what is earned")
        store: EarningStore | None = None
        if DATABASE.value is not None:
            store = stack.enter_context(open_store(DATABASE.value, SECRET.value, secret))
            remove_old(store, KEEP_DAYS.value)
        folder = Path(workdir or tinker or stack.enter_context(tempfile.TemporaryDirectory()))
        run = stack.enter_context(Run(run_config, folder))
        stack.enter_context(jax.set_mesh(run.mesh))
        if tinker is not None:
            of_run.check(run)
        begun = None
        if (kept_at := RECORD.value if store is None else SECRET.value) is not None:
            begun = _begun(Path(f"{kept_at}.begun"))
            stack.callback(begun.close)
        made = make_fleet(run, secret, keeper(write, store), begun=begun)
        fleet = stack.enter_context(made)
        model, step = weights_of(run, workdir, STEP.value)
        try:
            fleet.models.load(NAME.value, step, model)
        except ValueError as error:
            raise ConfigError(f"--served_as={NAME.value!r}: {error}") from error
        first = f"{NAME.value}@{step}"
        load_also(run, folder, fleet.models, ALSO.value)
        load_adapters(run, folder, fleet.models, first, model, ADAPTER.value)
        auto = run_config.serving.auto
        router = make_router(ROUTER.value, fleet.models, first, auto)
        fleet.models.route(AUTO, router)
        if isinstance(router, Thompson) and store is not None:
            store.follow(fleet.models, AUTO, auto.wait_s)
        access = Access(fleet, keys)
        feedback = [] if store is None else access.feedback_routes(store)
        routes = [*probes(fleet), *feedback]
        if tinker is not None:
            named = dict(base=first, model=model)
            api = stack.enter_context(of_run.open_api(run, fleet, access, tinker, **named))
            routes += api.routes()
        try:
            made = Endpoint(
                access.find,
                host=LISTEN.value,
                port=PORT.value,
                routes=routes,
                on_error=fleet.metrics.refused,
            )
        except OSError as error:
            raise ConfigError(f"--listen={LISTEN.value} --port={PORT.value}: {error}") from error
        fleet.opening = "its programs are being compiled"
        endpoint = stack.enter_context(made)
        console = flags.console()
        told = f"port {endpoint.port} answers /healthz; /readyz waits until programs are compiled"
        console.print(told, soft_wrap=True)
        fleet.warm_up(lambda: ended.told)
        fleet.opening = ""
        console.print(f"{NAME.value} on {endpoint.url}/v1", soft_wrap=True)
        while not ended.wait(_EXPIRE_S):
            remove_old(store, KEEP_DAYS.value)
        if not fleet.drain():
            console.print("answers are cut off: they took longer than serving.drain_s")


def _tinker_folder(workdir: str | None) -> Path | None:
    """The folder of Tinker's API; None where it is not served. Raises ConfigError."""
    if API.value != "tinker":
        if TINKER.value is not None:
            raise ConfigError(f"--tinker={TINKER.value} needs --api=tinker")
        return None
    if TINKER.value is None and workdir is None:
        raise ConfigError("--api=tinker needs --workdir, or --tinker=<folder> for its record")
    return Path(TINKER.value or Path(workdir or "") / "tinker")


class Ended:
    """Word of a signal that the program is to end. The second signal ends it at once."""

    def __init__(self) -> None:
        self._told = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def wait(self, seconds: float) -> bool:
        """Waits until then, or so long; whether it has."""
        return self._told.wait(seconds)

    @property
    def told(self) -> bool:
        """True if it has, now."""
        return self._told.is_set()

    def _end(self, number: int, frame: object) -> None:
        if self._told.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._told.set()


def weights_of(run: Run, workdir: str | None, step: int | None) -> tuple[Transformer, int]:
    """The weights of a workdir and their version, which is the step; the initial ones, version 0,
    without a workdir. Raises ConfigError where there is no checkpoint.
    """
    if workdir is None:
        return run.init_model(), 0
    check_trained(Path(workdir), run)
    return run.saved_model(workdir, step)


@contextlib.contextmanager
def recorder(path: str | None):
    """Appends answers to a file, each forced to the disk; yields what takes them."""
    if path is None:
        yield lambda record: None
        return
    lock = threading.Lock()
    try:
        make_private(Path(path))  # it holds what people wrote
        file = open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--record={path}: {error}") from error
    # launch.forget rewrites the file, and leaves it alone while a server appends to it
    fcntl.flock(file, fcntl.LOCK_SH)

    def write(record: AnswerRecord) -> None:
        line = json.dumps(dataclasses.asdict(record)) + "\n"
        with lock:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    with file:
        yield write


def open_store(url: str, secret_file: str | None, secret: bytes) -> EarningStore:
    """The store of a database. Raises ConfigError."""
    if secret_file is None:
        raise ConfigError(
            f"--database={url} needs --secret=<file>: with a secret made anew for this server, "
            "nobody could report what became of answers of the one before"
        )
    # completions are suggestions, and chats are turns of an agent
    reward = make_reward(FeedbackRewardConfig())
    try:
        return EarningStore(url, ids=AnswerIds(secret), reward=reward, claims=Claims())
    except (ValueError, OSError, SQLAlchemyError) as error:
        raise ConfigError(f"--database={database.explain(url, error)}") from error


def remove_old(store: EarningStore | None, keep_days: float) -> None:
    """Removes what is older than so many days, where there is a store."""
    if store is not None:
        gone = store.expire(time.time(), keep_days)
        if gone.answers or gone.events:
            words = "%d answers and %d events were older than %g days and are removed"
            logging.info(words, gone.answers, gone.events, keep_days)


def keeper(
    write: Callable[[AnswerRecord], None], store: EarningStore | None
) -> Callable[[AnswerRecord], Future | None]:
    """Keeper of each answer: in a file, and in a store where there is one."""

    def keep(record: AnswerRecord) -> Future | None:
        write(record)
        return None if store is None else store.submit_answer(record)

    return keep


def _begun(path: Path) -> Begun:
    try:
        return Begun(path)
    except OSError as error:
        raise ConfigError(f"what is being answered cannot be noted in {path}: {error}") from error


def _secret(path: str | None) -> bytes:
    if path is None:
        return secrets.token_bytes(32)
    try:
        return load_secret(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--secret={path}: {error}") from error


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, needs_workdir=False, expected=(SandboxUnavailable,))
