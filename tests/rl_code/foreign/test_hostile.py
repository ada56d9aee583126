"""Dumps with any value in any place are read or refused, and nothing else comes of them."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rl_code.config.read_config import ConfigError
from rl_code.foreign.formats import find_format
from rl_code.foreign.importing import numbers
from rl_code.foreign.tokens import Encoder, group_of
from rl_code.run.trajectory_log import Words
from rl_code.store import serialization
from tests.rl_code.foreign import dumps

VALUES = (
    *(None, True, -1, 0, 1.5, 1e400, float("nan"), 2**70, "", "x" * 50, "\ud800"),
    *([], {}, [[]], [None], ["a"], [1, "a"], [True, 1], [0.5], {"a": 1}, {"role": 3}),
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The places in a value, of lists those of the first items."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value[:3])
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed(value: Any, rng: random.Random) -> Any:
    """The value with others in a few places."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        *path, last = rng.choice(places(value))
        inner = value
        for key in path:
            inner = inner[key]
        if isinstance(inner, dict) and rng.random() < 0.2:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(rng.choice(VALUES))
    return value


def read(format: str, folder: Path, encoder: Encoder) -> bool:
    """Reads all of a dump as an import and a report do; False where it is refused."""
    source = find_format(format, {})
    try:
        for step, place in source.find([folder]).places.items():
            found = source.read(step, place)
            groups = [group_of(one, n, encoder, None, False) for n, one in enumerate(found)]
            serialization.loads(serialization.dumps(groups))
            json.loads(Words(encoder.tokenizer.decode).lines(step, groups).split("\n")[0])
            numbers(groups)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("format", "file"),
    [
        ("prime_rl", "prime_rl_a/traces/step_1/train/traces.jsonl"),
        ("prime_rl", "prime_rl_a/traces/step_1/train/annotations/trainer.jsonl"),
        ("verifiers", "verifiers_a/traces.jsonl"),
        ("verl", "verl/1.jsonl"),
    ],
)
def test_any_value_in_any_place_is_read_or_refused(tmp_path, format, file):
    rng = random.Random(file)
    encoder = Encoder.read(dumps.tokenizer(tmp_path / "tok"))
    dumps.verl(tmp_path / "verl")
    source = (tmp_path if format == "verl" else dumps.DATA) / file
    rows = [json.loads(row) for row in source.read_text().splitlines()]
    folder = tmp_path / "step_1" / "train"
    folder.mkdir(parents=True)
    if "annotations" in file:
        traces = source.parent.parent / "traces.jsonl"
        (folder / "traces.jsonl").write_text(traces.read_text())
        (folder / "annotations").mkdir()
    target = folder / ("annotations/trainer.jsonl" if "annotations" in file else source.name)
    outcomes = []
    for _ in range(60):
        made = [changed(rows[0], rng), *rows[1:]]
        target.write_text("".join(json.dumps(row) + "\n" for row in made))
        outcomes.append(read(format, folder, encoder))
    assert set(outcomes) == {True, False}
