"""The search for block sizes keeps what is faster, passes over what is refused, and leaves a file
that kernels read.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.compressed import blocks as compressed
from pallas_kernels.flash import api, blocks
from pallas_kernels.selected import tuning as selected
from planner import tune
from tests import programs

START = blocks.TuningConfig(64, 64, 64, 64, 64, 64)


def seconds(config: blocks.TuningConfig) -> float | None:
    """Best at block_q=256 and block_kv=16; a block_kv_dq above 64 does not run."""
    if config.block_kv_dq > 64:
        return None
    return 1.0 + abs(config.block_q - 256) / 256 + abs(config.block_kv - 16) / 16


@pytest.fixture
def search(monkeypatch):
    monkeypatch.setattr(tune, "measure", lambda _, setting, __: seconds(setting))
    return tune.Search(tuned.key("flash", "tpu", groups=2, head_dim=8), START, lambda setting: None)


def test_the_search_ends_at_the_fastest_setting_and_other_entries_stay(search, tmp_path):
    path = tmp_path / "runs" / "tuning.json"
    tune.save(path, dataclasses.replace(search, name="other"), START, 1.0, 1.0)
    best = tune.tune(search, path, 1)
    assert best == dataclasses.replace(START, block_q=256, block_kv=16)
    written = json.loads(path.read_text())
    assert set(written) == {"other", "flash tpu groups=2 head_dim=8"}
    found = written["flash tpu groups=2 head_dim=8"]
    assert (
        found["sizes"] == dataclasses.asdict(best)
        and found["seconds"] == 1.0 < found["heuristic_seconds"]
    )


def test_both_ways_to_get_at_queries_are_tried():
    start = selected.heuristic("hopper")
    found = [x for x in tune.neighbours(start) if x.gather_in_kernel != start.gather_in_kernel]
    assert found == [dataclasses.replace(start, gather_in_kernel=not start.gather_in_kernel)]


def test_kernels_take_the_sizes_of_the_file(search, tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    best = tune.tune(search, path, 1)
    monkeypatch.setenv(tuned.FILE, str(path))
    assert api._sizes("tpu", 2, 8) == best
    assert api._sizes("tpu", 4, 8) == blocks.heuristic("tpu", 4, 8)
    nested = compressed.heuristic("tpu", 2, 8, 16)
    changed = tuned.replace(nested, {"columns": 8, "attention": {"block_q": 16}})
    assert (changed.columns, changed.attention.block_q, changed.attention.block_kv) == (
        8,
        16,
        nested.attention.block_kv,
    )


@pytest.mark.parametrize(
    "text", ["no JSON", '{"flash tpu groups=2 head_dim=8": {"sizes": {"block": 3}}}']
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, text):
    path = tmp_path / "tuning.json"
    path.write_text(text)
    monkeypatch.setenv(tuned.FILE, str(path))
    with pytest.raises(ValueError, match=f"RL_CODE_TUNING={path}: flash tpu groups=2 head_dim=8: "):
        api._sizes("tpu", 2, 8)


def test_neighbours_double_or_halve_one_size_at_any_depth():
    found = list(tune.neighbours(compressed.TuningConfig(START, block_q=1, columns=4)))
    assert len(found) == 2 * 7 + 1 + 2 + 2  # a size of 1 cannot be halved
    assert all(setting.attention == START or setting.block_q == 1 for setting in found)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(tune.KERNELS))
def test_every_kernel_is_measured(name):
    shape = tune.Shape(rows=1, tokens=64, heads=2, kv_heads=1, head_dim=8, matrices=(4, 16, 8))
    search = tune.KERNELS[name](shape, "tpu", pltpu.InterpretParams())
    assert tune.measure(search, search.start, 1) > 0


REFUSED = {
    (): "say which kernel to tune, one of flash, compressed, selected, paged, grouped",
    ("flash",): "--file=<file> is missing",
    ("flash", "--file=x.json"): "jax runs on cpu, where no kernel does",
}


def test_a_wrong_command_line_is_refused():
    for line, words in REFUSED.items():
        done = programs.run("launch.tune", *line)
        assert done.returncode == 2 and words in done.stderr, done
