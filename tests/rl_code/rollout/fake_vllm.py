"""A server that answers as vLLM 0.32 did, and samples with the weights that are pushed to it.

The shapes of answers were recorded from vLLM's CPU build. Log-probabilities are those of this
project's model, computed for whole rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import load_file

from models import huggingface
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from tests.rl_code.rollout.small import ENGINE, _trainer

# What a server says of itself, of which only this is read.
SETTINGS = {
    "model_config": {
        "dtype": "torch.float32",
        "logprobs_mode": "processed_logprobs",
    },
    "parallel_config": {"tensor_parallel_size": 1},
    "scheduler_config": {"max_num_seqs": 16},
    "cache_config": {"enable_prefix_caching": True},
}


class FakeVllm:
    """The state of a server, which its handler changes.

    config: of the model that it serves. length: tokens of the longest context.
    """

    def __init__(self, config: ModelConfig, length: int = ENGINE.length):
        self.config, self.length = config, length
        self.version = "0.32.0"
        self.settings = json.loads(json.dumps(SETTINGS))
        self.settings["model_config"]["max_model_len"] = length
        self.workers = 1
        # for all fields below
        self.changed = threading.Condition()
        self.model: Any = None
        self.label = "default"
        # SHA-256 by tensor, of the weights that sample, and of those that are being loaded
        self.held: dict[str, str] = {}
        self.loading: tuple[Any, dict[str, str]] = None, {}
        # tensors that keep their old values when others are loaded
        self.stale: set[str] = set()
        self.paused = False
        # tokens that may be sampled before somebody allows more; None for all
        self.allowed: int | None = None
        self.sampled = 0
        self.aborted: set[str] = set()
        # bodies of requests for messages, and the routes that were asked, in order
        self.requests: list[dict[str, Any]] = []
        self.routes: list[str] = []

    def allow(self, more: int | None) -> None:
        """Lets so many more tokens be sampled; None for all."""
        with self.changed:
            self.allowed = None if more is None else self.sampled + more
            self.changed.notify_all()

    def await_sampled(self, count: int) -> None:
        """Waits until so many tokens are sampled."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.sampled >= count, timeout=60.0)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that is not for a message."""
        with self.changed:
            self.routes.append(path)
            match path:
                case "/version":
                    return {"version": self.version}
                case "/server_info":
                    return {"vllm_config": self.settings}
                case "/get_world_size":
                    return {"world_size": self.workers}
                case "/pause":
                    self.paused = True
                case "/update_weights":
                    self.loading = self._load(Path(body["update_info"]["folder"]))
                    assert self.loading[1] == body["update_info"]["digests"]
                case "/finish_weight_update" if body:
                    self.model, digests = self.loading
                    kept = {name: self.held[name] for name in self.stale}
                    self.held, self.label = digests | kept, body["weight_version"]
                case "/collective_rpc" if body != {"method": "rl_code_begin"}:
                    assert body == {"method": "rl_code_checksums"}
                    table = self.held.get("model.embed_tokens.weight")
                    return {"results": [{"lm_head.weight": table} | self.held]}
                case "/resume":
                    self.paused = False
                case "/inference/v1/abort_requests":
                    self.aborted |= {*body["request_ids"]}
            self.changed.notify_all()
        return {}

    def _load(self, folder: Path) -> tuple[Any, dict[str, str]]:
        mesh = make_mesh(MeshConfig(data=1, tensor=1))
        tensors = load_file(folder / "model.safetensors")
        digests = {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in tensors.items()}
        return huggingface.load(folder, self.config, mesh), digests

    def message(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The parts of the answer to a request for a message."""
        name, sampling = f"generate-tokens-{body['request_id']}", body["sampling_params"]
        rng = np.random.default_rng(sampling["seed"])
        tokens, count, reason = list(body["token_ids"]), 0, None
        spans: list[dict[str, Any]] = []
        with self.changed:
            self.requests.append(body)
        while reason is None:
            with self.changed:
                self.changed.wait_for(lambda: name in self.aborted or self._may_sample())
                if name in self.aborted:
                    reason, content = "abort", []
                else:
                    token, logprob = self._draw(tokens, rng)
                    tokens.append(token)
                    if not spans or spans[-1]["version"] != self.label:
                        spans.append({"version": self.label, "start": count})
                    count += 1
                    spans[-1]["end"] = count
                    self.sampled += 1
                    self.changed.notify_all()
                    content = [{"token_id": token, "logprob": logprob, "rank": 1}]
            if reason is None and tokens[-1] in sampling["stop_token_ids"]:
                reason = "stop"
            elif reason is None and count == sampling["max_tokens"]:
                reason = "length"
            choice = {
                "index": 0,
                "finish_reason": reason,
                "stop_reason": None,
                "token_ids": [one["token_id"] for one in content],
                "weight_versions": spans if reason else None,
                "logprobs": {"content": content},
            }
            yield {"request_id": name, "usage": None, "choices": [choice]}
        found = {"cached_tokens": 0}
        yield {"request_id": name, "usage": {"prompt_tokens_details": found}, "choices": []}

    def _may_sample(self) -> bool:
        return not self.paused and (self.allowed is None or self.sampled < self.allowed)

    def _draw(self, tokens: list[int], rng: np.random.Generator) -> tuple[int, float]:
        rows = np.zeros((12, self.length), np.int32)  # a shape that other tests compile too
        rows[0, : len(tokens)] = tokens
        logprobs = np.asarray(_trainer(self.model, rows))[0, len(tokens) - 1]
        token = int(np.argmax(logprobs + rng.gumbel(size=len(logprobs))))
        return token, float(logprobs[token])


class _Handler(http.server.BaseHTTPRequestHandler):
    fake: FakeVllm

    def do_GET(self) -> None:
        self._send(self.fake.answer(urlsplit(self.path).path, {}))

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        content = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(content)
        if path != "/inference/v1/generate":
            self._send(self.fake.answer(path, body))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked has gone
            for part in self.fake.message(body):
                self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def serving(fake: FakeVllm) -> Iterator[str]:
    """Serves; gives the URL."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
