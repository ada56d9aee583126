"""State of an adapter, computed again from its record, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from people.serving.tinker import adapters
from people.serving.tinker.adapters import Programs, State
from people.serving.tinker.history import Asked, History, Result
from people.serving.tinker.jobs import Model, Work
from people.serving.tinker.settings import adam_params
from people.serving.tinker.wire import read_forward


class Trained(Protocol):
    """Computer of batches: a ``trainer.Trainer``."""

    programs: Programs
    history: History

    def run_batch(
        self, rows: Sequence[tuple[Work, int] | None], shape: tuple[int, int, int, bool]
    ) -> None:
        """Computes one batch, and puts the results into the works."""
        ...

    def loaded(self, fields: Mapping[str, Any], user: str) -> State:
        """The state of the checkpoint that a request names. Raises ValueError."""
        ...


def replayed(
    trainer: Trained, model: Model, until: int | None = None, *, whole: bool = False
) -> State:
    """The state of an adapter behind request ``until`` (None for the last one that was carried
    out), computed again from its record, bit for bit.

    whole: from its beginning, and not from the newest snapshot. Raises ValueError where the record
    says that the weights were others, or is not whole.
    """
    history = trainer.history
    done = history.finished(model.id)
    if until is None:  # from the record: a result is on it before its request leaves the queue
        until = max((number for number, _, _ in done), default=0)
    snapshot = None if whole else last_snapshot(history, model.id, until)
    start = 0
    if snapshot is not None:
        data = history.weights(snapshot["file"]).read_bytes()
        base = trainer.programs.base
        state = adapters.load(base, model.settings, data, snapshot["steps"])
        start = snapshot["number"]
    else:
        first = next((asked for number, asked, _ in done if number == 0), None)
        if first is None:
            first = history.request(f"{model.id}:0")
        if first is None:
            raise ValueError(f"the record of {model.id} has no beginning")
        if first.kind == "load_weights":
            state = trainer.loaded(json.loads(first.body), model.user)
        else:
            state = adapters.begin(trainer.programs.base, model.settings)
    for number, asked, result in done:
        if start < number <= until:
            state = _again(trainer, model, state, asked, result)
    return state


def _again(trainer: Trained, model: Model, state: State, asked: Asked, result: Result) -> State:
    """The state behind one request that was carried out."""
    if result.error:
        return dataclasses.replace(state, gradient=None) if asked.kind == "optim_step" else state
    if asked.kind == "load_weights":
        return trainer.loaded(json.loads(asked.body), model.user)
    if asked.kind == "optim_step":
        state, _ = adapters.step(state, adam_params(json.loads(asked.body)))
        if adapters.digest(state) != result.notes["digest"]:
            raise ValueError(
                f"{asked.id}: the weights are not those on record; another version of jax, another "
                "device, or other settings serving.tinker than then"
            )
        return state
    if asked.kind != "forward_backward":
        return state
    forward = read_forward(asked.body)
    if forward.forward_only:
        return state
    work = Work(forward, state.part, lambda *_: None, list(range(len(forward.data))), state=state)
    for tokens, count, targets, _, places in result.notes["batches"]:
        rows: list[tuple[Work, int] | None] = [None] * count
        for at, index in places:
            rows[at] = work, index
        trainer.run_batch(rows, (tokens, count, targets, True))
    return dataclasses.replace(state, gradient=adapters.added(state.gradient, work.gradient))


def last_snapshot(history: History, model_id: str, until: int) -> dict[str, Any] | None:
    """The newest snapshot of an adapter that is not newer than a request, and is there."""
    found = [
        event
        for event in history.events
        if event["event"] == "snapshot"
        and event["model"] == model_id
        and event["number"] <= until
        and history.weights(event["file"]).exists()
    ]
    return max(found, key=lambda event: event["number"], default=None)
