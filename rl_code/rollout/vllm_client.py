"""Client of vLLM's server: tokens in and out, and the weights it samples with.

It uses the routes of vLLM 0.32: ``/inference/v1/generate`` streams token ids with their
log-probabilities, and tells at the end which version of the weights sampled which token;
``/pause``, ``/start_weight_update``, ``/update_weights``, ``/finish_weight_update`` and ``/resume``
are its protocol for new weights, for which ``in_vllm`` adds an engine that reads files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import mmap
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from absl import logging

from rl_code.config.read_config import ConfigError
from rl_code.weights.waiting import Deadline

# The version of vLLM whose routes these are.
VERSION = "0.32"
# Seconds between two looks for a server that starts.
_POLL_S = 1.0
# Characters of an answer that are told.
_LONGEST_ERROR = 500


class VllmError(RuntimeError):
    """The server cannot be reached, or answers something that training cannot use."""


class Cancelled(Exception):
    """A message was given up while it was sampled."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A sampled message."""

    tokens: list[int]
    # For each token its log-probability, and the label of the weights that sampled it.
    logprobs: list[float]
    labels: list[str]
    # Tokens of the prompt that were found in the server's cache.
    cached: int


class Request:
    """A message that is to be sampled.

    Args:
      name: a number of its own, in words.
      tokens: all tokens before the message.
      sampling: vLLM's SamplingParams.
      salt: prompts are shared with requests of the same salt alone.
      length: of some sampled tokens, how many make up the complete message; None if it is not over.
      every: tokens after which it is asked for the length.
    """

    def __init__(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        salt: str,
        length: Callable[[list[int]], int | None],
        every: int,
    ):
        self.name, self.salt, self.length, self.every = name, salt, length, every
        self.tokens, self.sampling = list(tokens), dict(sampling)
        self.cancelled = threading.Event()
        # of the answer, while it is read
        self._socket: socket.socket | None = None

    def listen(self, connection: socket.socket) -> None:
        """Notes the connection over which the answer comes. Raises Cancelled where the message was
        given up.
        """
        self._socket = connection
        if self.cancelled.is_set():
            raise Cancelled(self.name)

    def cancel(self) -> None:
        """Gives the message up; who reads the answer stops at once."""
        self.cancelled.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)


class VllmClient:
    """Talks to one server; its methods may be called from several threads.

    address: base URL of the server. deadline_s: seconds of silence after which a request fails.
    """

    def __init__(self, address: str, deadline_s: float):
        self.address = address.rstrip("/")
        self._deadline_s = deadline_s

    def await_up(self) -> None:
        """Waits for a server that is still starting. Raises VllmError where it does not come."""
        failure = None

        def is_up() -> bool:
            nonlocal failure
            try:
                with contextlib.closing(self._connect()) as connection:
                    self._ask(connection, "GET", "/health").read()
                return True
            except VllmError as error:
                if failure is None:
                    logging.warning("waiting for vLLM: %s", error)
                failure = error
                return False

        if not Deadline(self._deadline_s).wait(is_up, poll_s=_POLL_S):
            raise VllmError(f"no vLLM within {self._deadline_s:g} s: {failure}")

    def check(self, dtype: str, length: int, slots: int) -> dict[str, Any]:
        """The server's settings, as far as they matter. Raises ConfigError where they do not fit a
        run, VllmError where it cannot be reached.

        dtype: of the weights that will be pushed. length: tokens of the longest context. slots:
        messages that are sampled together.
        """
        version = self._get("/version").get("version", "")
        if not version.startswith(f"{VERSION}."):
            self._refuse(f"vLLM {version}, and rollout.engine.name='vllm' speaks to {VERSION}")
        settings = self._get("/server_info?config_format=json")["vllm_config"]
        model = settings["model_config"]
        workers = self._get("/get_world_size")["world_size"]
        held = str(model["dtype"]).removeprefix("torch.")
        if held != dtype:
            self._refuse(f"--dtype={held}, and rollout.dtype={dtype!r}; start it with that")
        mode = model["logprobs_mode"]
        if mode != "processed_logprobs":  # those of another distribution than is sampled from
            self._refuse(
                f"--logprobs-mode={mode}; start it with --logprobs-mode=processed_logprobs"
            )
        tensor = settings["parallel_config"]["tensor_parallel_size"]
        if workers != tensor:  # others have layers, or all weights, of their own
            self._refuse(
                f"{workers} workers, of which {tensor} share each layer; start it with as many as "
                "share each layer, without data or pipeline parallelism"
            )
        if model["max_model_len"] < length:
            self._refuse(
                f"--max-model-len={model['max_model_len']}, and rollout.engine.length={length}; "
                "start it with so many"
            )
        most = settings["scheduler_config"]["max_num_seqs"]
        if most < slots:
            self._refuse(
                f"--max-num-seqs={most}, and rollout.engine.slots={slots}; start it with so many"
            )
        return {
            "version": version,
            "dtype": held,
            "max_model_len": model["max_model_len"],
            "max_num_seqs": most,
            "prefix_caching": settings["cache_config"]["enable_prefix_caching"],
        }

    def begin(self) -> None:
        """Prepares the server for weights. Raises ConfigError where it lacks this project's engine
        for them.
        """
        try:
            self._post("/collective_rpc", {"method": "rl_code_begin"})
            self._post("/init_weight_transfer_engine", {"init_info": {}})
        except VllmError as error:
            self._refuse(
                f"no engine for weights ({error}); start it by rl_code/rollout/in_vllm/serve.py"
            )

    def sample(self, request: Request) -> Sampled:
        """Samples a message. Raises Cancelled where it was given up, VllmError where the server did
        not finish it.
        """
        body = {
            "request_id": request.name,
            "token_ids": request.tokens,
            "sampling_params": request.sampling,
            "cache_salt": request.salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        logprobs: list[float] = []
        length = reason = None
        spans: Sequence[Mapping[str, Any]] = ()
        asked = cached = 0
        with contextlib.closing(self._connect()) as connection:
            for chunk in self._events(connection, request, body):
                cached = _cached(chunk, cached)
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"]
                    logprobs += [one["logprob"] for one in choice["logprobs"]["content"]]
                    reason = choice["finish_reason"] or reason
                    spans = choice["weight_versions"] or spans
                if length is None and reason is None and len(tokens) - asked >= request.every:
                    asked = len(tokens)
                    length = request.length(tokens)
                    if length is not None:
                        # what follows is not wanted; the stream still tells the versions
                        ended = {"request_ids": [chunk["request_id"]]}
                        self._post("/inference/v1/abort_requests", ended)
        if request.cancelled.is_set():  # its connection was closed
            raise Cancelled(request.name)
        if reason not in ("length", "stop") and (length is None or reason != "abort"):
            raise VllmError(f"{self.address}: {request.name} ended by {reason!r}")
        if length is None:
            length = request.length(tokens)
        labels = [span["version"] for span in spans for _ in range(*_bounds(span))]
        if not len(labels) == len(logprobs) == len(tokens):
            raise VllmError(
                f"{self.address}: {request.name} has {len(tokens)} tokens, {len(logprobs)} "
                f"log-probabilities and {len(labels)} versions"
            )
        return Sampled(tokens[:length], logprobs[:length], labels[:length], cached)

    def push(self, folder: Path, label: str, *, recompute: bool) -> None:
        """Has the server sample with the weights of a folder from now on, in the middle of messages
        too, and compares what it then computes with.

        label: of the tokens that they sample. recompute: whether messages in progress compute their
        keys anew. Raises VllmError, after which the server may be paused.
        """
        sent = digests(folder)
        if not sent:
            raise ValueError(f"{folder} holds no weights")
        self._post("/pause?mode=keep", {})
        self._post("/start_weight_update", {})
        update = {"folder": str(folder), "digests": sent}
        self._post("/update_weights", {"update_info": update})
        self._post("/finish_weight_update", {"weight_version": label})
        # each worker tells of whole tensors
        told = self._post("/collective_rpc", {"method": "rl_code_checksums"})["results"]
        held = told[0]
        # a head of its own that shares the embedding's matrix
        if "lm_head.weight" in held and "lm_head.weight" not in sent:
            sent["lm_head.weight"] = sent["model.embed_tokens.weight"]
        wrong = sorted(name for name in sent if any(x.get(name) != sent[name] for x in told))
        if wrong:
            raise VllmError(
                f"{self.address}: after a push of {label}, {len(wrong)} of {len(sent)} tensors are "
                f"not what was sent: {', '.join(wrong[:5])}"
            )
        if recompute:
            self._post("/reset_prefix_cache?reset_running_requests=true", {})
        self._post("/resume", {})

    def _refuse(self, what: str) -> None:
        raise ConfigError(f"config.rollout.vllm.address = {self.address!r}: the server has {what}")

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        return http.client.HTTPConnection(
            str(parts.hostname), parts.port or 80, timeout=self._deadline_s
        )

    def _get(self, path: str) -> dict[str, Any]:
        with contextlib.closing(self._connect()) as connection:
            return json.loads(self._ask(connection, "GET", path).read())

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with contextlib.closing(self._connect()) as connection:
            content = self._ask(connection, "POST", path, body).read()
        return json.loads(content) if content else {}

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        """The answer to a request, of which the body is not read yet."""
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == http.client.OK:
                return answer
            said = answer.read().decode(errors="replace")[:_LONGEST_ERROR]
        except (OSError, http.client.HTTPException) as error:
            raise VllmError(f"{self.address}{path}: {error or type(error).__name__}") from error
        raise VllmError(f"{self.address}{path}: status {answer.status}: {said}")

    def _events(
        self, connection: http.client.HTTPConnection, request: Request, body: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """The parts of a streamed answer."""
        try:
            connection.connect()
            request.listen(connection.sock)
            answer = self._ask(connection, "POST", "/inference/v1/generate", body)
            for line in answer:
                if request.cancelled.is_set():
                    raise Cancelled(request.name)
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise VllmError(f"{self.address}: {str(chunk['error'])[:_LONGEST_ERROR]}")
                yield chunk
        except (OSError, http.client.HTTPException, VllmError) as error:
            if request.cancelled.is_set():
                raise Cancelled(request.name) from error
            if isinstance(error, VllmError):
                raise
            words = "no answer" if isinstance(error, TimeoutError) else str(error)
            raise VllmError(f"{self.address}: the stream of a message ended: {words}") from error


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor in the safetensors files of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                (size,) = struct.unpack("<Q", content[:8])
                header = json.loads(content[8 : 8 + size])
                for name, facts in header.items():
                    if name != "__metadata__":
                        start, end = (8 + size + at for at in facts["data_offsets"])
                        found[name] = hashlib.sha256(content[start:end]).hexdigest()
    return found


def _cached(chunk: Mapping[str, Any], before: int) -> int:
    """Tokens of the prompt that were in the cache, where a part of an answer tells it."""
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or before


def _bounds(span: Mapping[str, Any]) -> tuple[int, int]:
    return span["start"], span["end"]
