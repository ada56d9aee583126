"""The bench of grouped products runs, and times nothing that is wrong."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import grouped
from tests import programs


def run(*flags: str):
    return programs.run("launch.bench", "grouped", "--device=cpu", *flags)


@pytest.mark.long
def test_a_small_run(tmp_path):
    path = tmp_path / "a.json"
    done = run("--pairs=256", "--experts=4", "--matrix=24,16", f"--json={path}")
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["shape"] == [256, 4, 24, 16] and max(report["errors"].values()) < 1e-5
    rows = {(row["contender"], row["load"], row["gradients"]) for row in report["rows"]}
    names = ("ours", "ragged_dot", "one matrix")
    assert rows == {(n, load, g) for n in names for load in ("even", "uneven") for g in (0, 1)}
    assert all(0 < row["fastest"] <= row["seconds"] <= row["slowest"] for row in report["rows"])


def test_wrong_products_are_not_timed(monkeypatch):
    product = grouped.grouped_product
    monkeypatch.setattr(grouped, "grouped_product", lambda x, w, s: product(x, w, s.at[1].add(-1)))
    assert max(grouped.errors(jnp.float32).values()) > grouped.BOUND


def test_loads_add_up_to_all_pairs():
    for sizes in grouped.loads(1000, 7).values():
        assert sizes.sum() == 1000 and sizes.min() > 0
    assert grouped.loads(1000, 7)["uneven"][0] > 3 * grouped.loads(1000, 7)["uneven"][-1]


@pytest.mark.parametrize("fault", ["RESOURCE_EXHAUSTED: 64 GiB\nwhere", "INTERNAL: a bug"])
def test_a_contender_that_needs_too_much_memory_does_not_end_the_bench(monkeypatch, fault):
    def too_large(x, w, sizes):
        raise jax.errors.JaxRuntimeError(fault)

    options = types.SimpleNamespace(matrix=["8", "8"], device="cpu", pairs=64, experts=2, repeats=1)
    saved = []
    monkeypatch.setattr(grouped, "flags", types.SimpleNamespace(FLAGS=options))
    monkeypatch.setattr(grouped, "errors", lambda _: {"the products": 0.0})
    monkeypatch.setattr(grouped, "save", saved.append)
    too_much = grouped.Contender("ragged_dot", too_large)
    one = grouped.Contender("one matrix", lambda x, w, sizes: x @ w[0], gradients=False)
    monkeypatch.setattr(grouped, "contenders", lambda: [too_much, one])
    if "INTERNAL" in fault:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
            grouped.main()
        return
    grouped.main()
    rows = saved[-1]["rows"]
    assert [row.get("error") for row in rows] == (["RESOURCE_EXHAUSTED: 64 GiB"] * 2 + [None]) * 2
    cells = list(grouped.table(rows).columns[3].cells)
    assert cells[0] == "RESOURCE_EXHAUSTED: 64 GiB" and cells[2].endswith("]")
