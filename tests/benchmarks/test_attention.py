"""The bench of attention checks before it times, and its checks run the kernels on accelerators."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from absl import flags

from benchmarks import attention, correctness, mixing
from models.sharding import MeshConfig, abstract_mesh, use_mesh
from planner.kernel_programs import calls
from planner.targets import TARGETS
from tests import programs
from tests.benchmarks import small_bench
from tests.pallas_kernels import judge

SIZES = correctness.Sizes(tokens=192, heads=2, kv_heads=1, head_dim=128)
# A run's numbers, as --json holds them.
REPORT = dict(
    hardware="1 x NVIDIA H200",
    dtype="bfloat16",
    heads=16,
    kv_heads=2,
    head_dim=64,
    correctness=[dict(check="dense, rows", of="output", error=1e-3, bound=4e-3)],
    rows=[
        dict(contender=name, tokens=2048, gradients=False, seconds=seconds, fastest=seconds)
        | dict(slowest=seconds, bytes=2**20, flops=2e9, least=1e9, cpu_seconds=1.5 * seconds)
        for name, seconds in (("jax.nn", 0.004), ("dense", 0.002))
    ],
    decode=[
        dict(method="dense", tokens=2048, rows=8, implementation="all keys: gpu", bytes=3_000_000)
        | dict(seconds=0.001, fastest=0.001, slowest=0.002)
    ],
)


def test_the_bounds_are_those_that_the_tests_hold_kernels_to():
    assert judge.BOUNDS[jnp.float32] == correctness.BOUNDS


def test_what_is_wrong_or_not_a_number_is_found():
    (check,) = (one for one in correctness.checks(SIZES) if one.name == "dense, decode")
    arrays = [np.random.default_rng(0).standard_normal(shape) for shape in check.shapes]
    exact = correctness.compute(check, arrays, "float32", attention.make_mesh(MeshConfig(1, 1)))
    (error,) = correctness.errors([1.01 * exact[0]], exact)
    assert error == pytest.approx(0.01)
    assert not correctness.Found("", "output", error, 1e-3).right
    (error,) = correctness.errors([np.full_like(exact[0], np.nan)], exact)
    assert not correctness.Found("", "output", error, 1.0).right


# The kernels of Hopper differ from those of Blackwell in their products: each of them once is enough.
@pytest.mark.parametrize(
    ("target", "checked"),
    [("h200", ("dense", "nsa", "some blocks", "gated delta", "mla")), ("gb200", ""), ("v5p", "")],
)
@pytest.mark.quick(first=0)
def test_every_check_has_kernels_on_accelerators(target, checked):
    """Its program calls them, and each of them lowers."""
    device = TARGETS[target].device
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    custom_call = {"gpu": "custom_call @mosaic_gpu", "tpu": "custom_call @tpu_custom_call"}
    lowered = set()
    with use_mesh(abstract_mesh(MeshConfig(1, 1), device)):
        for check in (one for one in correctness.checks(SIZES) if one.name.startswith(checked)):
            if check.name.startswith(("gated delta", "mla")) and target == "gb200":
                continue  # which has no kernel of them
            dtype = jnp.dtype(check.dtype or jnp.bfloat16)
            arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in check.shapes]
            found = list(calls(jax.jit(check.run).trace(*arrays).jaxpr.jaxpr))
            # NSA has three branches; XLA attends to compressed keys that are not rotated
            branches = 3 if check.name.startswith("nsa") else 1
            least = branches - check.name.startswith("nsa, decode, keys not")
            assert len(found) >= least, check.name
            for call in found:
                # once where only numbers differ, as of tokens; addresses are no part of a kernel
                kernel = re.sub(r"0x[0-9a-f]+|\d+", "", str(call))
                if kernel not in lowered:
                    lowered.add(kernel)
                    text = lower(call, platform)
                    assert text.count(custom_call[device.platform]) == 1, check.name


def lower(call, platform: str) -> str:
    """The program that is this one call of a kernel."""
    run = jax.jit(lambda *x: call.primitive.bind(*x, **call.params))
    arrays = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in call.invars]
    return run.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def test_the_tables_of_the_page_are_made_from_the_numbers(tmp_path):
    text = attention.markdown(REPORT)
    assert "On 1 x NVIDIA H200; 16 query and 2 key/value heads of 64, bfloat16." in text
    assert "1 checks, the worst at 0.25 of its bound" in text
    assert "| 2048 | dense | forward | 0.002 [0.002, 0.002] | 0.003 | 2.00 | 1.00 |" in text
    assert "| 2048 | dense | all keys: gpu | 1.000 [1.000, 2.000] | - | 3.0 | 3.0 | 1.00 |" in text


def test_each_result_is_held_to_its_own_bound(monkeypatch):
    exact = [np.ones(4)] * 3
    # the first gradient is rough in any way; the second one is wrong by less, but has no excuse
    on_device = [np.ones(4), np.full(4, 1.08), np.full(4, 1.02)]
    on_cpu = [np.ones(4), np.full(4, 1.06), np.full(4, 1.001)]
    results = iter([exact, on_device, on_cpu])
    check = correctness.Check("dense, rows", lambda *_: (), ((1,),))
    monkeypatch.setattr(correctness, "checks", lambda sizes: iter([check]))
    monkeypatch.setattr(correctness, "compute", lambda *_: next(results))
    output, gradients = correctness.check_all("bfloat16", SIZES)
    assert output.right and not gradients.right
    assert gradients.error == pytest.approx(0.02) and gradients.bound == pytest.approx(0.002)


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [96]), ("gpu", [64, 96, 128])])
def test_nothing_is_timed_when_one_size_of_head_is_wrong(monkeypatch, device, sizes):
    def found(dtype, at):
        error = 0.5 if at.head_dim == sizes[-1] else 1e-5
        yield correctness.Found("dense, rows", "gradients", error, 1e-4)

    monkeypatch.setattr(correctness, "check_all", found)
    given = dict(check_length=128, heads=4, kv_heads=2, head_dim=96, device=device)
    options = dataclasses.make_dataclass("Options", [*given])(**given)
    report = dict(dtype="float32", correctness=[])
    monkeypatch.setattr(attention, "save", lambda _: None)
    last = f"not timed: dense, rows, heads of {sizes[-1]} \\(gradients\\)$"
    with pytest.raises(SystemExit, match=last):
        attention._check(report, options, attention.rich.console.Console(quiet=True))
    assert [row["check"].split()[-1] for row in report["correctness"]] == [*map(str, sizes)]


@pytest.mark.long
def test_a_device_that_is_not_there_is_named_with_what_to_do():
    done = programs.run("launch.bench", "attention", "--device=gpu")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "--device=gpu, but jax runs on cpu: it found no GPU. Does nvidia-smi list one? Then "
        "pip install -e .[cuda]"
    )


@pytest.mark.long
def test_a_small_run(tmp_path):
    path = tmp_path / "a.json"
    small = ["--lengths=128", "--heads=2", "--kv_heads=1", "--check_length=64", "--repeats=1"]
    done = small_bench.run("attention", *small, f"--json={path}")
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert len(report["correctness"]) == 16 and len(report["decode"]) == 7
    assert {row["contender"] for row in report["rows"]} == {*(attention.PEER, *attention.OURS)}
    assert attention.markdown(report).count("\n|") > 12


@pytest.mark.parametrize(
    ("name", "fault", "goes_on"),
    [
        (attention.CUDNN, NotImplementedError("cuDNN is not there"), True),
        (attention.PEER, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 128 GiB"), True),
        ("dense", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 128 GiB"), True),
        ("dense", jax.errors.JaxRuntimeError("INTERNAL: a bug of ours"), False),
        ("dense", ValueError("a bug of ours"), False),
    ],
)
def test_a_peer_that_does_not_run_does_not_end_the_bench(monkeypatch, name, fault, goes_on):
    def measure(*_):
        raise fault

    options = types.SimpleNamespace(contenders=[], repeats=1, json=None)
    contender = attention.Contender(name, lambda: None, (), 1e9)
    monkeypatch.setattr(attention, "contenders", lambda *_: [contender])
    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(attention, "save", lambda _: None)
    console = rich.console.Console(file=io.StringIO())
    if not goes_on:
        with pytest.raises(type(fault), match="a bug of ours"):
            list(attention.time_rows(64, options, 1, console))
        return
    rows = list(attention.time_rows(64, options, 1, console))
    cells = list(attention.cells_of(rows))
    assert [row[3] for row in cells] == [str(fault)] * 2 and cells[0][6:] == ("-",) * 5


def test_a_contender_that_there_is_not_is_named_before_anything_runs(monkeypatch):
    options = types.SimpleNamespace(table=None, contenders=["dense", "denes"])
    monkeypatch.setattr(flags, "FLAGS", options)
    with pytest.raises(
        flags.IllegalFlagValueError, match=r"no denes is there, expected some of jax\.nn, cudnn"
    ):
        attention.main()


@pytest.mark.long
def test_the_names_of_contenders_are_those_that_run(monkeypatch):
    for draw in ("normal", "uniform"):  # numbers play no part
        monkeypatch.setattr(jax.random, draw, lambda key, shape, dtype: np.zeros(shape, dtype))
    monkeypatch.setattr(mixing, "initial", lambda key, shape, std: np.zeros(shape, np.float32))
    sizes = dict(heads=2, kv_heads=1, head_dim=16, device="gpu", alike_keys=1)
    options = types.SimpleNamespace(**sizes)
    names = [one.name for one in attention.contenders(256, options)]
    assert names == [*attention.PEERS, *attention.OURS]
