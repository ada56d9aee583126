"""launch.aot says in its table what each compiler said, and what is missing."""

from __future__ import annotations

import dataclasses
import io

import jax
import jax.numpy as jnp
import pytest
import rich.console

from models.sharding import MeshConfig, abstract_mesh, use_mesh
from pallas_kernels.flash.api import flash_attention
from pallas_kernels.flash.blocks import cost, heuristic
from pallas_kernels.paged.api import paged_attention
from pallas_kernels.tokens import sequences
from planner import aot
from planner.kernel_programs import WORKLOADS, _kernel, calls, kernels
from planner.targets import INSTALL, TARGETS, is_installed
from tests import programs


def test_a_missing_compiler_has_a_row_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(aot, "is_installed", lambda package: False)
    for target in TARGETS.values():
        (row,) = aot.in_own_process(target)
        assert row.kernel == "all kernels" and row.target == target.name
        assert row.answer.endswith(f"not installed: {INSTALL}")


@pytest.mark.long
def test_a_compiler_that_ends_its_process_has_a_row_too(monkeypatch):
    monkeypatch.setattr(aot, "is_installed", lambda package: True)
    broken = dataclasses.replace(TARGETS["v5e"], name="no such target")
    (row,) = aot.in_own_process(broken)
    assert row.answer.startswith("the compiler's process ended with code 1: ")


@pytest.mark.parametrize("target", ["v5p", "h100", "gb200"])
def test_the_kernels_of_a_program_are_found_inside_of_its_loops(target):
    tokens = sequences(jnp.array([60]), 64)

    def loop(q, k):
        def step(q, _):
            return flash_attention(q, k, k, tokens, tokens)[0], None

        return jax.lax.scan(step, q, length=3)[0]

    q, k = (jax.ShapeDtypeStruct((1, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))
    with use_mesh(abstract_mesh(MeshConfig(1, 1), TARGETS[target].device)):
        traced = jax.jit(loop).trace(q, k)
    (found,) = calls(traced.jaxpr.jaxpr)
    name = found.params.get("name") or found.params["name_and_src_info"].name
    assert name == "flash_forward"


@pytest.mark.long
@pytest.mark.parametrize("target", ["v6e", "gb200"])
def test_every_program_of_a_workload_gives_its_kernels(target):
    (nsa,) = (workload for workload in WORKLOADS if workload.name == "8B, nsa")
    found = kernels(TARGETS[target], (nsa,))
    for program, names in {
        "update": {"flash_forward", "flash_backward_q", "flash_backward_kv", "selected_forward"},
        "prefill": {"flash_forward", "compressed_select", "selected_forward"},
        "decode": {
            "paged_attention",
            "selected_paged_attention",
            "compressed_paged_attention",
        },
    }.items():
        mine = {kernel.name for kernel in found if f"8B, nsa: {program}" in kernel.callers}
        assert names <= mine
    # a kernel with the same arguments is listed once, with all that call it
    keys = [(kernel.name, *map(str, kernel.arguments)) for kernel in found]
    assert len(keys) - len(set(keys)) <= 2  # which differ in what is static, as a window


REFUSED = {
    ("kernels", "--targets=v5e,v99"): "--targets=v99 must be one of v5e; ",
    (): "say what to compile: python -m launch.aot kernels",
    ("kernels", "--kernels_of=9B"): "--kernels_of=9B must be one of quickstart; ",
}


@pytest.mark.long
def test_a_wrong_command_line_is_refused():
    for line, words in REFUSED.items():
        done = programs.run("launch.aot", *line)
        assert done.returncode == 2 and words in done.stderr, done


def test_the_table_shows_brackets_as_they_are():
    console = rich.console.Console(file=io.StringIO(), width=300)
    console.print(aot.table([aot.Row("all kernels", "h100", "", (), f"not installed: {INSTALL}")]))
    assert INSTALL in console.file.getvalue()


def test_time_at_peak_is_the_slower_of_arithmetic_and_memory():
    target = TARGETS["v5e"]
    row = aot.Row("flash_forward", "v5e", "", (), "compiled", hbm=int(2 * target.bandwidth))
    assert row.milliseconds == pytest.approx(2000)
    slower = dataclasses.replace(row, flops=int(3 * target.flops))
    assert slower.milliseconds == pytest.approx(3000)
    assert dataclasses.replace(row, hbm=None, answer="no").milliseconds is None


@pytest.mark.parametrize(
    ("memory", "registers", "threads", "resident"),
    [
        (117 * 1024, 185, 256, 1),  # shared memory for one
        (60 * 1024, 185, 256, 1),  # registers for one
        (60 * 1024, 126, 256, 2),
        (0, 32, 128, 16),
    ],
)
def test_a_multiprocessor_holds_what_its_scarcest_resource_allows(
    memory, registers, threads, resident
):
    row = aot.Row("a", "gb200", "", (), "compiled", memory, registers, 0, threads)
    assert row.resident == resident
    assert dataclasses.replace(row, registers=None).resident is None


def test_an_array_that_a_kernel_is_given_twice_is_one_argument():
    """Its bytes count once, and the call that is compiled gets it in both places."""
    q = jax.ShapeDtypeStruct((2, 1, 8, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((8, 1, 64, 128), jnp.bfloat16)
    places = jnp.full((2, 1), 255, jnp.int32)

    def attend(q, k):
        tables = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
        return paged_attention(q, k, k, tables, places, places[:, 0] + 1)[0]

    with use_mesh(abstract_mesh(MeshConfig(1, 1), TARGETS["v5e"].device)):
        traced = jax.jit(attend).trace(q, k)
        (equation,) = calls(traced.jaxpr.jaxpr)
        kernel = _kernel(equation, "a: b")
        again = jax.jit(kernel.function).trace(*kernel.arguments)
    assert kernel.name == "paged_attention"
    assert len(kernel.arguments) < len(equation.invars)
    (same,) = calls(again.jaxpr.jaxpr)
    given = [[(x.aval.shape, x.aval.dtype) for x in one.invars] for one in (same, equation)]
    assert given[0] == given[1]


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


@pytest.mark.skipif(not is_installed("libtpu"), reason=f"libtpu is not installed: {INSTALL}")
def test_kernels_compile_for_tpu_v5e():
    rows = aot.in_own_process(TARGETS["v5e"], ["quickstart"])
    assert {row.answer for row in rows} == {"compiled"} and len(rows) >= 5
    assert all(row.memory and row.hbm for row in rows)


@pytest.mark.skipif(
    not is_installed("jax-cuda13-plugin"), reason=f"jax-cuda13-plugin is not installed: {INSTALL}"
)
@pytest.mark.parametrize("name", ["h100", "gb200"])
def test_kernels_compile_for_gpus(name):
    rows = aot.in_own_process(TARGETS[name], ["quickstart"])
    assert {row.answer for row in rows} == {"compiled"} and len(rows) >= 4
    assert all(row.memory and row.registers and row.spilled is not None for row in rows)
