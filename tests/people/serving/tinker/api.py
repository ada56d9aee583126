"""A tiny model behind Tinker's API, and requests as its client writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.sharding import MeshConfig, make_mesh, use_mesh
from people.serving.access import Access, KeyFile
from people.serving.fleet import Fleet
from people.serving.service import Service
from people.serving.tinker import wire
from people.serving.tinker.adapters import Programs, State
from people.serving.tinker.checkpoints import Checkpoints
from people.serving.tinker.history import History
from people.serving.tinker.replay import replayed
from people.serving.tinker.routes import Served, Tinker
from people.serving.tinker.sampler import Sampler
from people.serving.tinker.trainer import Trainer
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.rollout.engine import Engine
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.run.serving import TinkerConfig
from tests.rl_code.harness.chats import chat_tokenizer
from tests.rl_code.harness.test_rollout import ENGINE, MODEL
from tests.rl_code.rollout.small import model_on

CONFIG = TinkerConfig(rows=4, tokens=256, max_rank=4, adapters=2, snapshot_steps=2)
VOCAB = chat_tokenizer().vocab_size


@functools.cache
def mesh():
    return make_mesh(MeshConfig(data=1, tensor=1))


@functools.cache
def base():
    return model_on(mesh(), MODEL)


@functools.cache
def programs() -> Programs:
    return Programs(base(), CONFIG.max_rank)


@functools.cache
def engine() -> Engine:
    tokenizer = chat_tokenizer()
    stops = tuple(sorted(tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")))
    # few blocks of the view, of which each is compiled
    config = dataclasses.replace(ENGINE, length=200, view_block=104)
    return Engine(MODEL, config, SamplingConfig(), stops, mesh())


def make_trainer(folder: Path, config: TinkerConfig = CONFIG, **named: Any) -> Trainer:
    """A trainer that has not begun."""
    history = History(folder)
    sizes = dict(mesh=mesh(), vocab=VOCAB, longest=200)
    return Trainer(programs(), history, Checkpoints(history), config, **sizes, **named)


def replay(trainer: Trainer, model: str, until: int | None = None) -> State:
    """The state of an adapter, replayed from its beginning by the programs of the trainer's thread:
    without its mesh they would be compiled another time.
    """
    with use_mesh(mesh()):
        return replayed(trainer, trainer.models[model], until, whole=True)


class Server:
    """The API on a port, and a client that reads JSON and protocol buffers."""

    def __init__(self, url: str, trainer: Trainer, key: str = "ada"):
        self.url, self.trainer, self.key = url, trainer, key

    def send(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            data if method == "POST" else None,
            {"X-API-Key": self.key},
            method=method,
        )
        try:
            with urllib.request.urlopen(asked, timeout=600) as answer:
                found = answer.read()
                if "protobuf" in (answer.headers["content-type"] or ""):
                    return answer.status, found
                return answer.status, json.loads(found or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        status, found = self.send(path, body, method)
        assert status < 300, found
        return found

    def result(self, future: Mapping[str, Any]) -> Any:
        while True:
            asked = {"request_id": future["request_id"]}
            status, found = self.send("retrieve_future", asked)
            if status != 408:
                assert status == 200, found
                return found

    def session(self) -> str:
        return self.ask("create_session", {"tags": []})["session_id"]

    def model(self, session: str, number: int = 0, **lora: Any) -> str:
        config = {"rank": 2, "seed": 1, **lora}
        asked = dict(session_id=session, model_seq_id=number, base_model="tiny", lora_config=config)
        return self.result(self.ask("create_model", asked))["model_id"]

    def train(self, model: str, number: int, tokens: Sequence[int] = (5, 6, 7, 8), **fields: Any):
        return self.ask("forward_backward", forward(model, number, [datum(tokens)], **fields))

    def step(self, model: str, number: int, rate: float = 0.01) -> Any:
        return self.ask("optim_step", optim(model, number, rate))


@contextlib.contextmanager
def server(folder: Path, keys: Path | None = None, *, paused: bool = False) -> Iterator[Server]:
    """The API of a folder. paused: without a running trainer."""
    tokenizer = chat_tokenizer()

    def service(weights, version):
        scheduler = Scheduler(engine(), tokenizer, workers=2, worker_deadline_s=600.0)
        return Service(scheduler, weights, version=version, protocol=PROTOCOLS["hermes"])

    fleet = Fleet(service, protocol=PROTOCOLS["hermes"], tokenizer=tokenizer, secret=bytes(32))
    fleet.models.load("tiny", 0, base())
    access = Access(fleet, None if keys is None else KeyFile(keys))
    api: Tinker | None = None
    trainer = make_trainer(folder, on_finish=lambda id: api.finished(id) if api else None)

    def sampler(on_end):
        parts = trainer, trainer.checkpoints, fleet.text, tokenizer
        return Sampler(fleet.models, "tiny@0", *parts, on_end)

    served = Served(("tiny",), str(folder.resolve()), "transformer", trainer.longest)
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.history.close)
        stack.enter_context(fleet)
        api = Tinker(served, trainer.history, trainer.checkpoints, trainer, sampler, access)
        if not paused:
            stack.enter_context(trainer)
        endpoint = stack.enter_context(Endpoint(access.find, routes=api.routes()))
        yield Server(endpoint.url, trainer)


def datum(
    tokens: Sequence[int], weights: Sequence[float] | None = None, **inputs: Sequence[float]
) -> dict[str, np.ndarray]:
    """A sequence and the inputs of its loss; the targets are the tokens that follow."""
    count = len(tokens) - 1
    found = {
        "tokens": np.asarray(tokens[:-1], "<i4"),
        "target_tokens": np.asarray(tokens[1:], "<i8"),
    }
    if not inputs:
        found["weights"] = np.asarray([1.0] * count if weights is None else weights, "<f4")
    return found | {name: np.asarray(values, "<f4") for name, values in inputs.items()}


def forward(
    model: str,
    number: int,
    data: Sequence[Mapping[str, np.ndarray]],
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    only: bool = False,
) -> bytes:
    """The body of a request for a loss."""
    found = wire._bytes(1, model.encode()) + wire._int(2, number) + wire._bytes(4, loss.encode())
    for each in data:
        tokens = wire._bytes(1, wire._bytes(1, each["tokens"].tobytes()))
        body = wire._bytes(1, tokens)
        for name, values in each.items():
            if name == "tokens":
                continue
            tensor = wire._bytes(1, values.tobytes()) + wire._int(3, 1 + (values.dtype.kind == "i"))
            tensor += b"".join(wire._int(4, size) for size in values.shape)
            body += wire._bytes(2, wire._bytes(1, name.encode()) + wire._bytes(2, tensor))
        found += wire._bytes(3, body)
    for name, value in (config or {}).items():
        found += wire._bytes(5, wire._bytes(1, name.encode()) + wire._double(2, value))
    return found + (wire._int(6, 1) if only else b"")


def optim(model: str, number: int, rate: float = 0.01, **fields: float) -> dict[str, Any]:
    """The body of a request for a step."""
    adam = dict(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-12) | fields
    return dict(model_id=model, seq_id=number, adam_params=adam)


def logprobs_of(body: bytes) -> list[np.ndarray]:
    """The arrays "logprobs" of a result."""
    found = []
    for record in wire._parse(body)[2]:
        for entry in wire._parse(record)[2]:
            array = wire._parse(wire._entry(entry)[1])
            values = np.frombuffer(array[1][0], "<f4")
            offsets = np.frombuffer(array[2][0], "<i8") // 4
            found += [values[a:b] for a, b in itertools.pairwise(offsets)]
    return found


def metrics_of(body: bytes) -> dict[str, float]:
    """The metrics of a result."""
    entries = [wire._parse(entry) for entry in wire._parse(body)[3]]
    return {entry[1][0].decode(): entry[2][0] for entry in entries}


def samples_of(body: bytes) -> list[tuple[int, list[int], np.ndarray]]:
    """(reason, tokens, log-probabilities) of each sample of a result."""
    found = []
    for each in wire._parse(body)[1]:
        fields = wire._parse(each)
        tokens = np.frombuffer(fields[2][0], "<i4").tolist()
        found.append((fields.get(1, [0])[0], tokens, np.frombuffer(fields[3][0], "<f4")))
    return found
