"""launch.aot says in its table what each compiler said, and what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys

import pytest

from launch import aot
from launch.kernel_programs import NAMES
from launch.targets import TARGETS
from pallas_kernels.cost import Cost
from pallas_kernels.flash.blocks import cost, heuristic

KERNELS = [f"{family} {name}" for family in NAMES for name in NAMES[family]]


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_a_missing_compiler_has_a_row_per_kernel_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda package: False)
    for target in TARGETS.values():
        rows = aot.in_own_process(target)
        assert [row.kernel for row in rows] == KERNELS
        for row in rows:
            assert row.target == target.name and row.answer.endswith(
                f"not installed: {aot.INSTALL}"
            )


def test_a_compiler_that_ends_its_process_has_rows_too(monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda package: True)
    broken = dataclasses.replace(TARGETS["v5e"], name="no such target")
    rows = aot.in_own_process(broken)
    assert len(rows) == len(KERNELS)
    assert all(row.answer.startswith("the compiler's process ended with code 1: ") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--targets=v5e,v99"], "--targets=v99 must be of v5e, "),
        ([], "say what to compile: python -m launch.aot kernels"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "launch.aot", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 1 and message in done.stderr


def test_time_at_peak_is_the_slower_of_arithmetic_and_memory():
    target = TARGETS["v5e"]
    slow = Cost(
        flops=int(target.flops), transcendentals=0, bytes_accessed=int(2 * target.bandwidth)
    )
    assert aot.Row("flash forward", "v5e", "compiled", cost=slow).milliseconds == pytest.approx(
        2000
    )


def test_cost_counts_the_visible_pairs():
    shape = (1, 8, 4, 16)
    keys = (1, 8, 2, 16)
    tuning = heuristic("tpu", 2, 16)
    # 1 + 2 + ... + 8 pairs
    assert cost("forward", shape, keys, 2, tuning).flops == 2 * 2 * 16 * 4 * 36
    assert (
        cost("backward_kv", shape, keys, 2, tuning).flops
        == 2 * cost("forward", shape, keys, 2, tuning).flops
    )
    assert cost("forward", shape, (1, 24, 2, 16), 2, tuning).flops == 2 * 2 * 16 * 4 * (36 + 8 * 16)


@pytest.mark.skipif(not installed("libtpu"), reason=f"libtpu is not installed: {aot.INSTALL}")
def test_kernels_compile_for_tpu_v5e():
    rows = aot.in_own_process(TARGETS["v5e"])
    assert [row.answer for row in rows] == ["compiled"] * len(KERNELS)
    assert all(row.memory for row in rows)


@pytest.mark.skipif(
    not installed("jax-cuda13-plugin"), reason=f"jax-cuda13-plugin is not installed: {aot.INSTALL}"
)
@pytest.mark.parametrize("name", ["h100", "gb200"])
def test_kernels_compile_for_gpus(name):
    rows = aot.in_own_process(TARGETS[name])
    assert [row.answer for row in rows] == ["compiled"] * len(KERNELS)
