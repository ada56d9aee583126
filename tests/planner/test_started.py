"""Launches of the programs of a run: counted a step, and refused where nothing can be counted."""

from __future__ import annotations

import json
import types

import pytest

from planner import started
from planner.targets import INSTALL, TARGETS, is_installed
from tests import programs
from tests.planner.test_launches import LOOP

SLICE = 64 * 32 * 2


class Compiled:
    """A compiled program of a known text: its loop has a count that depends on data."""

    def as_text(self) -> str:
        changes = {
            'backend_config={"known_trip_count":{"n":"4"}}': "",
            "direction=LT": "direction=NE",
            "__cublas$gemm": "mosaic_gpu_v2",
        }
        text = LOOP
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        return text

    def memory_analysis(self):
        return types.SimpleNamespace(temp_size_in_bytes=7)


def test_of_a_decode_program_one_step_counts():
    found = started.row(Compiled(), "decode", TARGETS["h100"], layers=2, loop=16, pages=8)
    assert (found.launches, found.copies, found.again, found.temporary) == (7, 3, 1, 7)
    assert found.again_bytes == 2 * SLICE
    (kernel,) = [x for x in found.sources if x.kind == "kernel"]
    # the array of 8 pages is half full; the kernel's scratch is one of its results
    assert kernel.bytes == 8 * 64 * 2 / 2 + SLICE + 8 * 32 * 2 + 4194304
    assert found.milliseconds["launches"] == 1e3 * 7 * started.LAUNCH_S
    assert started.from_json(started.to_json(found)) == found


def test_of_an_update_all_micro_batches_count():
    found = started.row(Compiled(), "update", TARGETS["h100"], layers=2, loop=3, pages=None)
    assert (found.launches, found.again) == (21, 3)


# Launches that a layer adds to a decode step, by the model: see docs/benchmarks/launches.md.
MOST = {"smollm2-135m": 10, "qwen3-8b": 13}


@pytest.mark.long
@pytest.mark.skipif(
    not is_installed("jax-cuda13-plugin"), reason=f"jax-cuda13-plugin is not installed: {INSTALL}"
)
@pytest.mark.parametrize("model", MOST)
def test_a_layer_adds_few_launches_to_a_decode_step_and_no_copy_of_weights(model, tmp_path):
    found = []
    for layers in (2, 3):
        file = tmp_path / f"{layers}.json"
        words = ("launches", "--targets=h100", "--programs=decode", f"--model={model}")
        done = programs.run("launch.aot", *words, f"--layers={layers}", f"--json={file}")
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(file.read_text())["rows"]
        assert row["again"] == 0
        found.append(row["launches"])
    assert found[1] - found[0] <= MOST[model]


@pytest.mark.parametrize(
    "words, says",
    [
        (["launches"], "launches needs --model=<preset> or --config=<file>"),
        (["launches", "--model=qwen"], "--model=qwen must be one of"),
        (["launches", "--model=tiny", "--targets=v5e"], "only a GPU's programs"),
        (["launches", "--config=none.py", "--targets=h100"], "none.py: no such config file"),
        ([], "say what to compile"),
    ],
)
def test_a_wrong_command_line_is_refused(words, says):
    done = programs.run("launch.aot", *words)
    assert done.returncode == 2 and says in done.stderr, done.stderr
