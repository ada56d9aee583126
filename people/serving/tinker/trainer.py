"""Carries out what clients ask of adapters in training, each adapter's requests in their order.

Rows of different adapters, losses and requests are computed in one batch where they have the same
shape. A result is on record before anybody hears of it, with the places that its rows had in
batches. So the state of an adapter is a function of its record: ``replay.replayed`` computes it
again, bit for bit, after a crash or for a check.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from absl import logging
from jax.sharding import Mesh

from models.lora import Adapters
from models.sharding import use_mesh
from people.serving.tinker import adapters, losses
from people.serving.tinker.adapters import AdapterSettings, Programs, State
from people.serving.tinker.checkpoints import Checkpoints
from people.serving.tinker.history import Asked, History, Result
from people.serving.tinker.jobs import Model, Work, not_finite, written
from people.serving.tinker.replay import last_snapshot, replayed
from people.serving.tinker.settings import adam_params, settings_of
from people.serving.tinker.wire import Datum, Forward, read_forward
from rl_code.host import files
from rl_code.run.serving import TinkerConfig

_SHORTEST = 32


class Trainer:
    """The thread that computes. A context manager, which ends it.

    longest: the most tokens of a sequence. vocab: tokens of the tokenizer.
    """

    def __init__(
        self,
        programs: Programs,
        history: History,
        checkpoints: Checkpoints,
        config: TinkerConfig,
        *,
        mesh: Mesh,
        vocab: int,
        longest: int,
        on_finish: Callable[[str], None] = lambda id: None,
    ):
        """on_finish: called with the id of each request that has a result."""
        self.programs, self.history, self.checkpoints = programs, history, checkpoints
        self.config, self.longest, self.vocab = config, longest, vocab
        self._mesh, self._on_finish = mesh, on_finish
        self._changed = threading.Condition()
        self._works: list[Work] = []
        self._creating: list[Asked] = []
        self._stop = False
        # Why the thread has ended of its own.
        self.error: BaseException | None = None
        # How many batches had rows of so many different adapters.
        self.mixed: dict[int, int] = {}
        self.models = {}
        for event in history.events:
            if event["event"] == "model":
                self._add_model(event)
        self._thread = threading.Thread(target=self._run, name="tinker trainer", daemon=True)

    def __enter__(self) -> Trainer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begins to carry requests out; those that were handed in before are there."""
        self._thread.start()

    def close(self) -> None:
        """Ends after the batch or request that is being computed; the rest stays on record."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, asked: Asked) -> None:
        """Hands in a request that is on record: of a model, ``<model>:<number>``."""
        model_id, _, number = asked.id.rpartition(":")
        with self._changed:
            if number == "0":
                self._creating.append(asked)
            else:
                self.models[model_id].waiting[int(number)] = asked
            self._changed.notify_all()

    def score(self, part: Mapping[str, Adapters] | None, tokens: Sequence[int]) -> Future:
        """Log-probabilities of the tokens [N] behind the first one: a future of float32 [N - 1]."""
        future: Future = Future()
        inner, targets = (np.asarray(x, np.int32) for x in (tokens[:-1], tokens[1:]))
        datum = Datum(inner, {"target_tokens": targets, "weights": np.ones(len(inner), np.float32)})
        forward = Forward("", 0, [datum], "cross_entropy", {}, True)

        def done(work: Work, error: Exception | None) -> None:
            if error is None:
                future.set_result(work.outputs[0])
            else:
                future.set_exception(error)

        with self._changed:
            self._works.append(Work(forward, part, done, [0]))
            self._changed.notify_all()
        return future

    # --- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with use_mesh(self._mesh):
                while self._round():
                    pass
        except BaseException as error:  # as of a full disk; a thread has nobody to raise it to
            self.error = error
            logging.exception("the trainer has stopped")

    def _round(self) -> bool:
        """Waits for requests, and carries out what can be; False where the trainer is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._works or self._ready())
            if self._stop:
                return False
            ready = self._ready()
        for asked, model in ready:
            self._begin(asked, model)
        if self._works:
            self._compute()
        return True

    def _ready(self) -> list[tuple[Asked, Model | None]]:
        """Requests whose turn it is."""
        found: list[tuple[Asked, Model | None]] = [(asked, None) for asked in self._creating]
        for model in self.models.values():
            if not model.busy and model.next in model.waiting:
                found.append((model.waiting[model.next], model))
        return found

    def _begin(self, asked: Asked, model: Model | None) -> None:
        """Carries a request out, or begins to where rows have to be computed."""
        try:
            if model is None:
                self._creating.remove(asked)
                result = self._create(asked)
            else:
                if model.state is None:
                    model.state = replayed(self, model)
                if asked.kind == "forward_backward":
                    self._begin_rows(asked, model)
                    return
                result = _CARRIED_OUT[asked.kind](self, asked, model)
        except Exception as error:
            result = failed(error)
        self._finish(asked, model, result)

    def _begin_rows(self, asked: Asked, model: Model) -> None:
        assert model.state is not None
        forward = read_forward(asked.body)
        losses.check(forward, self.vocab, self.longest)

        def done(work: Work, error: Exception | None) -> None:
            model.busy = False
            if error is None:
                error = not_finite(work)
            if error is not None:
                self._finish(asked, model, failed(error))
                return
            result = Result("", written(work), binary=True, notes={"batches": work.batches})
            assert model.state is not None
            if work.backward:
                total = adapters.added(model.state.gradient, work.gradient)
                model.state = dataclasses.replace(model.state, gradient=total)
            self._finish(asked, model, result)

        work = Work(forward, model.state.part, done, list(range(len(forward.data))))
        work.state = model.state
        model.busy = True
        with self._changed:
            self._works.append(work)

    def _finish(self, asked: Asked, model: Model | None, result: Result) -> None:
        self.history.finish(asked.id, result)
        if model is not None:
            if asked.kind == "optim_step" and result.error and model.state is not None:
                model.state = dataclasses.replace(model.state, gradient=None)
            with self._changed:
                del model.waiting[model.next]
                model.next += 1
            steps = model.state.steps if model.state else 0
            due = asked.kind == "optim_step" and steps % self.config.snapshot_steps == 0
            if not result.error and (due or asked.kind == "load_weights"):
                self._snapshot(model)
        self._on_finish(asked.id)

    # --- Batches ------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Computes one batch: that of the oldest work, with all that has its shape."""
        with self._changed:
            works = list(self._works)
        shape = self._shape(works[0], works[0].left[0])
        fitting = [
            [(work, index) for index in work.left if self._shape(work, index) == shape]
            for work in works
        ]
        # in turns, so that a long request does not make the others wait
        rows: list[tuple[Work, int]] = []
        turn = 0
        while len(rows) < shape[1] and any(fitting):
            if queue := fitting[turn % len(fitting)]:
                rows.append(queue.pop(0))
            turn += 1
        mine = {id(work): work for work, _ in rows}
        error = None
        try:
            placed: list[tuple[Work, int] | None] = [*rows, *[None] * (shape[1] - len(rows))]
            self.run_batch(placed, shape)
        except Exception as found:
            error = found
            logging.exception("a batch of %d rows failed", len(rows))
        adapters_in = len({id(work.part) for work in mine.values()})
        self.mixed[adapters_in] = self.mixed.get(adapters_in, 0) + 1
        for work in mine.values():
            if error is None and work.left:
                continue
            with self._changed:
                self._works.remove(work)
            work.done(work, error)

    def _shape(self, work: Work, index: int) -> tuple[int, int, int, bool]:
        """(tokens, rows, targets, backward) of the batch for a datum."""
        datum = work.forward.data[index]
        tokens = _rounded(max(len(datum.tokens), _SHORTEST))
        rows = max(1, min(self.config.rows, self.config.tokens // tokens))
        return tokens, rows, _rounded(losses.width(datum)), work.backward

    def run_batch(
        self, rows: Sequence[tuple[Work, int] | None], shape: tuple[int, int, int, bool]
    ) -> None:
        """Computes one batch, with each row in its place, and puts the results into the works."""
        tokens, count, targets, backward = shape
        given = losses.terms_of(
            [row and (row[0].forward, row[0].forward.data[row[1]]) for row in rows], tokens, targets
        )
        parts = [row and row[0].part for row in rows]
        logp, found, gradient = self.programs.run(parts, *given, backward=backward)
        several = len({id(part) for row, part in zip(rows, parts, strict=True) if row})
        for work in {id(row[0]): row[0] for row in rows if row}.values():
            places = [(at, row[1]) for at, row in enumerate(rows) if row and row[0] is work]
            for at, index in places:
                datum = work.forward.data[index]
                values = logp[at, : len(datum.tokens), : losses.width(datum)]
                work.outputs[index] = values.reshape(datum.inputs["target_tokens"].shape)
                work.losses[index] = float(found[at])
                work.left.remove(index)
            if backward and work.state is not None:
                own = [at for at, _ in places]
                more = self.programs.gradient_of(work.state, gradient, own, count)
                work.gradient = adapters.added(work.gradient, more)
            work.batches.append([tokens, count, targets, several, [list(each) for each in places]])

    # --- What is not computed in batches --------------------------------------------------------

    def _create(self, asked: Asked) -> Result:
        fields = json.loads(asked.body)
        model_id = asked.id.rpartition(":")[0]
        if model_id in self.models:  # the result of it was not written any more
            return self._created(asked, model_id)
        if asked.kind == "load_weights":
            checkpoint = self.checkpoints.find(fields["path"], asked.user)
            settings = checkpoint.settings
            state = self.loaded(fields, asked.user)
        else:
            settings = settings_of(fields, model_id, self.config.max_rank)
            state = adapters.begin(self.programs.base, settings)
        event = self.history.note(
            event="model",
            id=model_id,
            user=asked.user,
            session=fields["session_id"],
            settings=dataclasses.asdict(settings),
            metadata=fields.get("user_metadata"),
        )
        model = self._add_model(event)
        model.state = state
        return self._created(asked, model_id)

    def _created(self, asked: Asked, model_id: str) -> Result:
        body = {"model_id": model_id, "type": asked.kind}
        return Result("", json.dumps(body).encode())

    def _add_model(self, event: Mapping[str, Any]) -> Model:
        settings = AdapterSettings(**event["settings"])
        who = event["user"], event["session"]
        model = Model(event["id"], *who, settings, event["metadata"], event["at"])
        numbers = [number for number, _, _ in self.history.finished(model.id)]
        model.next = max(numbers, default=0) + 1
        with self._changed:
            self.models[model.id] = model
        return model

    def _optim_step(self, asked: Asked, model: Model) -> Result:
        assert model.state is not None
        model.state, metrics = adapters.step(model.state, adam_params(json.loads(asked.body)))
        notes = {"digest": adapters.digest(model.state)}
        return Result("", json.dumps({"metrics": metrics}).encode(), notes=notes)

    def _save_weights(self, asked: Asked, model: Model) -> Result:
        fields = json.loads(asked.body)
        kind = "training" if asked.kind == "save_weights" else "sampler"
        assert model.state is not None
        number = fields.get("sampling_session_seq_id")
        named = fields.get("path") or f"{'step' if number is None else 'sampler'}-{asked.id}"
        saved = self.checkpoints.save(
            model.state,
            kind,
            model.id,
            model.user,
            asked.id,
            named.replace(":", "-"),
            ttl_s=fields.get("ttl_seconds"),
            overwrite=bool(fields.get("overwrite", False)),
            metadata=fields.get("user_metadata"),
        )
        body: dict[str, Any] = {"path": saved.path, "type": asked.kind}
        if number is not None:
            sampler = f"{model.session}:sample:{number}"
            there = [e for e in self.history.events if e.get("sampler") == sampler]
            if not there:
                self.history.note(
                    event="sampler", sampler=sampler, user=model.user, path=saved.path
                )
            body["sampling_session_id"] = sampler
        return Result("", json.dumps(body).encode())

    def _load_weights(self, asked: Asked, model: Model) -> Result:
        fields = json.loads(asked.body)
        state = self.loaded(fields, asked.user)
        if state.settings != dataclasses.replace(model.settings, seed=state.settings.seed):
            raise ValueError(
                f"{fields['path']} has {state.settings}, and this one {model.settings}"
            )
        model.state = state
        return Result("", json.dumps({"path": fields["path"], "type": "load_weights"}).encode())

    def loaded(self, fields: Mapping[str, Any], user: str) -> State:
        """The state of the checkpoint that a request names. Raises ValueError."""
        found = self.checkpoints.find(fields["path"], user)
        if fields.get("optimizer") and found.kind != "training":
            raise ValueError(f"{found.path} has no state of the optimizer; save_state writes one")
        data = self.checkpoints.read(found)
        state = adapters.load(self.programs.base, found.settings, data, found.steps)
        if not fields.get("optimizer"):
            fresh = adapters.begin(self.programs.base, found.settings)
            state = dataclasses.replace(state, moments=fresh.moments)
        return state

    def _snapshot(self, model: Model) -> None:
        """Keeps the state of an adapter, so that a restart replays only what came after."""
        assert model.state is not None
        number = model.next - 1
        name = f"{model.id}:snapshot:{number}"
        data = adapters.dump(model.state, moments=True)
        files.write_atomically(self.history.weights(name), data, private=True)
        before = last_snapshot(self.history, model.id, number - 1)
        self.history.note(
            event="snapshot", model=model.id, number=number, steps=model.state.steps, file=name
        )
        if before is not None:
            self.history.weights(before["file"]).unlink(missing_ok=True)


_CARRIED_OUT = {
    "optim_step": Trainer._optim_step,
    "save_weights": Trainer._save_weights,
    "save_weights_for_sampler": Trainer._save_weights,
    "load_weights": Trainer._load_weights,
}


def failed(error: Exception) -> Result:
    """The result of a request that could not be carried out."""
    asked_wrong = isinstance(error, ValueError | KeyError)
    if not asked_wrong:
        logging.error("a request failed", exc_info=error)
    why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return Result(why, notes={"category": "user" if asked_wrong else "server"})


def _rounded(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()
