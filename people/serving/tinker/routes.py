"""The paths of Tinker's API, as the client ``tinker`` 0.38 asks them (``/api/v1/...``).

Whatever takes time is a future: a request is put on record, its id goes back, and
``retrieve_future`` waits for the result. Ids are made of the session and the client's own numbers;
a request that comes again gets the id that it has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from absl import logging
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from people.serving.access import Access, FleetClient
from people.serving.tinker.checkpoints import Checkpoint, Checkpoints, iso
from people.serving.tinker.history import Asked, History, Result
from people.serving.tinker.sampler import Sampler
from people.serving.tinker.trainer import Model, Trainer
from people.serving.tinker.wire import read_forward
from rl_code.harness.endpoint.connections import key_of
from rl_code.harness.endpoint.fields import ApiError

# Seconds that a request waits for a result before its client asks again, and between two looks.
_WAIT_S, _LOOK_S = 20.0, 0.01
# Paths whose requests belong to an adapter in training.
_TRAINING = ("optim_step", "save_weights", "save_weights_for_sampler")


@dataclasses.dataclass(frozen=True)
class Served:
    """The facts about the model that clients get."""

    # Names that it may be asked by; the first is the one that is shown.
    names: tuple[str, ...]
    # The folder of its tokenizer, from which ``transformers`` loads it without a hub.
    tokenizer: str
    architecture: str
    longest: int


class Tinker:
    """The API in front of a trainer and a sampler."""

    def __init__(
        self,
        served: Served,
        history: History,
        checkpoints: Checkpoints,
        trainer: Trainer,
        make_sampler: Callable[[Callable[[Asked, Result | None, int], None]], Sampler],
        access: Access,
    ):
        self._served, self._history, self._checkpoints = served, history, checkpoints
        self._trainer, self._access = trainer, access
        self._sessions: dict[str, dict[str, Any]] = {}
        self._samplers: dict[str, dict[str, Any]] = {}
        for event in history.events:
            if event["event"] == "session":
                self._sessions[event["session"]] = event
        self._lock = threading.Lock()
        # What a request gives back when it ends, by its id.
        self._leave: dict[str, Callable[[int], None]] = {}
        self._sampler = make_sampler(self._sampled)
        for asked in history.unfinished():
            if asked.kind == "asample":
                self._start_sample(asked)
            else:
                trainer.submit(asked)

    def routes(self) -> list[Route]:
        """The routes, for ``Endpoint``."""
        posts: dict[str, Callable[[FleetClient, bytes], Any]] = {
            "client/config": lambda client, body: {"use_pyqwest_transport": False},
            "client/dynamic_config": lambda client, body: {},
            "telemetry": lambda client, body: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "forward_backward": self._forward_backward,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "cancel_future": lambda client, body: None,
            **{kind: self._training(kind) for kind in _TRAINING},
        }
        gets: dict[str, Callable[..., Any]] = {
            "get_server_capabilities": self._capabilities,
            "healthz": lambda client: {"status": "ok"},
            "samplers/{id}": self._get_sampler,
            "training_runs": self._list_runs,
            "training_runs/{id}": self._get_run,
            "training_runs/{id}/checkpoints": self._list_checkpoints,
            "checkpoints": self._all_checkpoints,
            "sessions": self._list_sessions,
            "sessions/{id}": self._get_session,
        }
        found = [
            Route(f"/api/v1/{path}", self._handler(_posted(function)), methods=["POST"])
            for path, function in posts.items()
        ]
        found += [
            Route(f"/api/v1/{path}", self._handler(_got(function)), methods=["GET"])
            for path, function in gets.items()
        ]
        one = "/api/v1/training_runs/{id}/checkpoints/{kind}/{name}"
        return [
            *found,
            Route("/api/v1/retrieve_future", self._retrieve, methods=["POST"]),
            Route("/api/v1/sessions/{id}/finish", self._handler(_ended), methods=["POST"]),
            Route(one, self._handler(_got(self._delete)), methods=["DELETE"]),
        ]

    # --- Requests -------------------------------------------------------------------------------

    def _client(self, request: Request) -> FleetClient:
        client = self._access.find(key_of(request.scope))
        if client is None:
            raise ApiError("the API key is not known here", status=401, code="invalid_api_key")
        return client

    def _handler(
        self, function: Callable[[FleetClient, Mapping[str, str], bytes], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            client = self._client(request)
            body = await request.body()
            try:
                found = await run_in_threadpool(function, client, request.path_params, body)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = str(error) if isinstance(error, ValueError) else repr(error)
                raise ApiError(f"the request cannot be read: {why}") from error
            return Response(status_code=204) if found is None else JSONResponse(found)

        return handle

    def _accept(
        self, client: FleetClient, kind: str, id: str, body: bytes, choices: int = 1
    ) -> tuple[Asked, bool]:
        """(the request on record, True if it is new). Raises ApiError where its key is over a
        limit, or another request has its id.
        """
        with self._lock:
            there = self._history.request(id)
            if there is not None:
                if there.kind != kind or there.user != client.user:
                    raise ApiError(f"request {id} is there already, and is another one")
                return there, False
            self._leave[id] = client.enter(choices)
            try:
                return self._history.accept(Asked(id, kind, client.user, time.time(), body)), True
            except BaseException:
                self._leave.pop(id)(0)
                raise

    def finished(self, id: str, tokens: int = 0) -> None:
        """A request has its result, or will not have one from this process."""
        with self._lock:
            leave = self._leave.pop(id, None)
        if leave is not None:
            leave(tokens)

    def _train(
        self, client: FleetClient, kind: str, model_id: str, number: Any, body: bytes
    ) -> dict[str, Any]:
        model = self._model(client, model_id)
        if type(number) is not int or number < 1:
            raise ApiError(f"seq_id={number!r} must be a number from 1")
        asked, fresh = self._accept(client, kind, f"{model.id}:{number}", body)
        if fresh:
            self._trainer.submit(asked)
        return {"request_id": asked.id, "model_id": model.id}

    def _training(self, kind: str) -> Callable[[FleetClient, bytes], Any]:
        def ask(client: FleetClient, body: bytes) -> dict[str, Any]:
            fields = json.loads(body)
            return self._train(client, kind, fields["model_id"], fields.get("seq_id"), body)

        return ask

    def _forward_backward(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        try:
            asked = read_forward(body)
        except ValueError as error:
            raise ApiError(f"forward_backward cannot be read: {error}", status=422) from error
        return self._train(client, "forward_backward", asked.model_id, asked.seq_id, body)

    def _create_model(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        self._check_base(fields["base_model"])
        return self._create(client, "create_model", fields, body)

    def _load_weights(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        if fields.get("weights_access_token"):
            raise ApiError("weights_access_token is not served here", status=422)
        if fields.get("model_id"):
            ids = fields["model_id"], fields.get("seq_id")
            return self._train(client, "load_weights", *ids, body)
        if fields.get("base_model"):
            self._check_base(fields["base_model"])
        return self._create(client, "load_weights", fields, body)

    def _create(
        self, client: FleetClient, kind: str, fields: Mapping[str, Any], body: bytes
    ) -> dict[str, Any]:
        """Accepts a request for a new adapter."""
        session = self._session(client, fields["session_id"])
        model_id = f"{session}:train:{int(fields['model_seq_id'])}"
        asked, fresh = self._accept(client, kind, f"{model_id}:0", body)
        if fresh:
            self._trainer.submit(asked)
        return {"request_id": asked.id, "model_id": model_id}

    def _check_base(self, name: str) -> None:
        # programs write the folder as they were told it, perhaps through a link
        if name not in self._served.names and os.path.realpath(name) != self._served.tokenizer:
            served = ", ".join(self._served.names)
            raise ApiError(f"base_model={name!r} is not served here; there is {served}", status=404)

    # --- Futures --------------------------------------------------------------------------------

    async def _retrieve(self, request: Request) -> Response:
        client = self._client(request)
        fields = json.loads(await request.body())
        id = fields.get("request_id")
        try:
            asked = self._history.request(id)
        except (ValueError, AttributeError):
            asked = None
        if asked is None or asked.user != client.user:
            raise ApiError(f"request_id={id!r} is no future of this API key", status=404)
        deadline = time.monotonic() + _WAIT_S
        while (result := self._history.result(asked.id)) is None:
            if self._trainer.error is not None:
                why = f"the trainer has stopped: {self._trainer.error}"
                raise ApiError(why, status=503, kind="server_error")
            if time.monotonic() > deadline or await request.is_disconnected():
                waits = {"type": "try_again", "request_id": id, "queue_state": "active"}
                return JSONResponse(waits, status_code=408)
            await asyncio.sleep(_LOOK_S)
        if result.error:
            category = result.notes.get("category", "unknown")
            return JSONResponse({"error": result.error, "category": category})
        kind = "application/x-protobuf" if result.binary else "application/json"
        return Response(result.body, media_type=kind)

    # --- Sampling -------------------------------------------------------------------------------

    def _create_sampler(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        session = self._session(client, fields["session_id"])
        id = f"{session}:sample:{int(fields['sampling_session_seq_id'])}"
        path = self._source(client, fields)
        if self._find_sampler(id) is None:
            self._history.note(event="sampler", sampler=id, user=client.user, path=path)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def _source(self, client: FleetClient, fields: Mapping[str, Any]) -> str | None:
        """The path that is sampled from; None for the base model. Raises ApiError."""
        path = fields.get("model_path")
        if path:
            try:
                return self._checkpoints.find(path, client.user).path
            except ValueError as error:
                raise ApiError(str(error), status=404) from error
        self._check_base(fields.get("base_model") or "")
        return None

    def _sample(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        sampler = fields.get("sampling_session_id")
        if sampler:
            found = self._find_sampler(sampler)
            if found is None or found["user"] != client.user:
                raise ApiError(f"sampling_session_id={sampler!r} is not known", status=404)
            id = f"{sampler}:{int(fields['seq_id'])}"
        else:
            self._source(client, fields)
            id = f"sample-{secrets.token_hex(12)}"
        count = fields.get("num_samples", 1)
        choices = count if type(count) is int and count > 0 else 1
        asked, fresh = self._accept(client, "asample", id, body, choices)
        if fresh:
            self._start_sample(asked)
        sequences = [f"{id}:{index}" for index in range(choices)]
        return {"request_id": id, "sample_sequence_ids": sequences}

    def _start_sample(self, asked: Asked) -> None:
        fields = json.loads(asked.body)
        checkpoint = None
        try:
            sampler = self._find_sampler(fields.get("sampling_session_id") or "")
            path = sampler["path"] if sampler else fields.get("model_path")
            if path:
                checkpoint = self._checkpoints.find(path, asked.user)
        except ValueError as error:
            self._sampled(asked, Result(str(error), notes={"category": "user"}), 0)
            return
        self._sampler.sample(asked, checkpoint)

    def _sampled(self, asked: Asked, result: Result | None, tokens: int) -> None:
        try:
            if result is not None:
                self._history.finish(asked.id, result)
        except OSError:  # the request has no result, and the next server samples it again
            logging.exception("samples of %s are not on record", asked.id)
        self.finished(asked.id, tokens)

    def _find_sampler(self, id: str) -> dict[str, Any] | None:
        if id not in self._samplers:  # the trainer makes some too
            for event in list(self._history.events):
                if event["event"] == "sampler":
                    self._samplers[event["sampler"]] = event
        return self._samplers.get(id)

    # --- Sessions and what there is -------------------------------------------------------------

    def _create_session(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        session = f"s-{secrets.token_hex(12)}"
        self._sessions[session] = self._history.note(
            event="session",
            session=session,
            user=client.user,
            name=fields.get("display_name"),
            metadata=fields.get("user_metadata"),
        )
        told = "adapters here have no matrix for the unembedding: train_unembed has no effect"
        return {"type": "create_session", "session_id": session, "info_message": told}

    def _session(self, client: FleetClient, id: str) -> str:
        found = self._sessions.get(id)
        if found is None or found["user"] != client.user:
            raise ApiError(f"session_id={id!r} is no session of this API key", status=404)
        return id

    def _heartbeat(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        self._session(client, json.loads(body)["session_id"])
        return {"type": "session_heartbeat"}

    def _model(self, client: FleetClient, id: str) -> Model:
        found = self._trainer.models.get(id)
        if found is None or found.user != client.user:
            raise ApiError(f"model_id={id!r} is no adapter of this API key", status=404)
        return found

    def _get_info(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        model = self._model(client, json.loads(body)["model_id"])
        return {
            "type": "get_info",
            "model_data": {
                "arch": self._served.architecture,
                "model_name": self._served.names[0],
                "tokenizer_id": self._served.tokenizer,
            },
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.settings.rank,
            "model_name": self._served.names[0],
        }

    def _weights_info(self, client: FleetClient, body: bytes) -> dict[str, Any]:
        path = json.loads(body)["tinker_path"]
        try:
            found = self._checkpoints.find(path, client.user)
        except ValueError as error:
            raise ApiError(str(error), status=404) from error
        return {
            "base_model": self._served.names[0],
            "is_lora": True,
            "lora_rank": found.settings.rank,
            "train_unembed": False,
            "train_mlp": found.settings.mlp,
            "train_attn": found.settings.attention,
        }

    def _capabilities(self, client: FleetClient) -> dict[str, Any]:
        model = {"max_context_length": self._served.longest, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **model} for name in self._served.names]}

    def _get_sampler(self, client: FleetClient, id: str) -> dict[str, Any]:
        found = self._find_sampler(id)
        if found is None or found["user"] != client.user:
            raise ApiError(f"sampler {id!r} is not known", status=404)
        base = self._served.names[0]
        return {"sampler_id": id, "base_model": base, "model_path": found["path"]}

    def _run_of(self, model: Model) -> dict[str, Any]:
        mine = [each for each in self._checkpoints.all().values() if each.model_id == model.id]
        last = {each.kind: each for each in mine}
        return {
            "training_run_id": model.id,
            "base_model": self._served.names[0],
            "model_owner": model.user,
            "is_lora": True,
            "lora_rank": model.settings.rank,
            "last_request_time": iso(model.at),
            "last_checkpoint": last["training"].shown() if "training" in last else None,
            "last_sampler_checkpoint": last["sampler"].shown() if "sampler" in last else None,
            "user_metadata": model.metadata,
        }

    def _models_of(self, client: FleetClient) -> list[Model]:
        return [model for model in self._trainer.models.values() if model.user == client.user]

    def _list_runs(self, client: FleetClient) -> dict[str, Any]:
        runs = [self._run_of(model) for model in self._models_of(client)]
        return {"training_runs": runs, "cursor": _cursor(runs)}

    def _get_run(self, client: FleetClient, id: str) -> dict[str, Any]:
        return self._run_of(self._model(client, id))

    def _list_checkpoints(self, client: FleetClient, id: str) -> dict[str, Any]:
        model = self._model(client, id)
        found = [each for each in self._mine(client) if each.model_id == model.id]
        return {"checkpoints": [each.shown() for each in found]}

    def _all_checkpoints(self, client: FleetClient) -> dict[str, Any]:
        found = [each.shown() for each in self._mine(client)]
        return {"checkpoints": found, "cursor": _cursor(found)}

    def _mine(self, client: FleetClient) -> list[Checkpoint]:
        return [each for each in self._checkpoints.all().values() if each.user == client.user]

    def _delete(self, client: FleetClient, id: str, kind: str, name: str) -> None:
        try:
            path = f"tinker://{id}/{kind}/{name}"
            self._checkpoints.delete(self._checkpoints.find(path, client.user))
        except ValueError as error:
            raise ApiError(str(error), status=404) from error

    def _list_sessions(self, client: FleetClient) -> dict[str, Any]:
        mine = [id for id, each in self._sessions.items() if each["user"] == client.user]
        return {"sessions": mine}

    def _get_session(self, client: FleetClient, id: str) -> dict[str, Any]:
        session = self._sessions[self._session(client, id)]
        samplers = [
            event["sampler"]
            for event in list(self._history.events)
            if event["event"] == "sampler" and event["sampler"].startswith(f"{id}:")
        ]
        models = [model.id for model in self._models_of(client) if model.session == id]
        return {
            "training_run_ids": models,
            "sampler_ids": samplers,
            "user_metadata": session["metadata"],
            "display_name": session["name"],
        }


def _cursor(found: list) -> dict[str, int]:
    return {"offset": 0, "limit": len(found), "total_count": len(found)}


def _ended(client: FleetClient, path: Mapping[str, str], body: bytes) -> None:
    """A session has no end here: its futures and adapters stay."""


def _posted(function: Callable[[FleetClient, bytes], Any]) -> Callable[..., Any]:
    return lambda client, path, body: function(client, body)


def _got(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda client, path, body: function(client, **path)
