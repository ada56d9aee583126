"""Every method of METHODS has every property; a new one is tested by an entry in CASES. Squid is
dense attention, whose properties on documents are tested as those of dense.

Methods with projections of their own are compared with their definitions in files of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from attention import reference
from attention.methods.api import METHODS
from attention.methods.dense import Dense
from attention.methods.dsa import DSA
from attention.methods.gated_delta import GatedDelta
from attention.methods.gated_documents import GatedDocuments
from attention.methods.method import Method
from attention.methods.mla import MLA
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.sinks import Sinks
from attention.methods.squid import Squid
from attention.methods.window import Window
from models.paged import model_cache
from models.transformer import Transformer
from tests.attention import not_finite, properties
from tests.attention.cache.model import PAGE

ROOT = Path(__file__).resolve().parents[2]


def dense(method, q, keys, inputs, parameters):
    return reference.dense(q, *keys["main"], window=getattr(method, "window", None))


def sinks(method, q, keys, inputs, parameters):
    ahead = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    mask = jnp.broadcast_to((ahead >= 0) & (ahead < method.window), (q.shape[1], *ahead.shape))
    return reference.attention_with_sinks(q, *keys["main"], mask, inputs[..., 0])


def moba(method, q, keys, inputs, parameters):
    return reference.moba(q, *keys["main"], method)


def nsa(method, q, keys, inputs, parameters):
    def compressed(x, name):
        mlp = (parameters[f"{name}_{part}"] for part in ("positions", "first", "second"))
        return reference.compress(x, *mlp, method)

    k, v = keys["raw"]
    pair = compressed(k, "k"), compressed(v, "v")
    return reference.nsa(q, pair, keys["main"], keys["window"], inputs, method)


def gated_documents(method, q, keys, inputs, parameters):
    return reference.gated_documents(q, *keys["main"], jnp.zeros(q.shape[0], int), inputs)


INDEXER = dict(picks=12, index_heads=6, index_size=10)
# Small settings of every method, and its definition.
CASES = {
    "dense": (Dense(), dense),
    "window": (Window(7), dense),
    "moba": (MoBA(block=PAGE, picks=2), moba),
    "nsa": (NSA(length=8, stride=4, block=PAGE, picks=3, initial=1, local=1, window=10), nsa),
    "gated_documents": (GatedDocuments(), gated_documents),
    "sinks": (Sinks(7), sinks),
    # values longer than keys
    "mla": (MLA(12, None, 6, 20), None),
    "dsa": (
        DSA(12, 10, 6, 4, interleaved=True, score_factor=1.7, **INDEXER, index_loss=1.0),
        None,
    ),
    "gated_delta": (GatedDelta(key_heads=2, value_heads=4, key_size=6, value_size=10), None),
}
DEFINED = [name for name, (_, reference) in CASES.items() if reference]
# A state begins with a run, of which single rows and documents do not tell.
KINDS = {name: ("documents", "long", "packed") for name in DEFINED}
KINDS |= {"mla": ("documents", "packed"), "dsa": ("documents", "packed")}
KINDS["gated_delta"] = ("packed",)
# Sinks have a window, on all kinds of rows.
KINDS["window"] = ("packed",)
# The kind of rows that is quick for a method: in it are all kinds of tokens that are not seen. DSA
# is an MLA.
QUICK_KIND = {
    "dense": "documents",
    "moba": "packed",
    "sinks": "packed",
    "dsa": "packed",
}


def long(value):
    """A case that is beyond the quick ones."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)


def methods(*quick: str, of=CASES):
    """Every method, of which these are quick."""
    names = [name if name in quick else long(name) for name in of]
    return pytest.mark.parametrize("name", names)


def on_rows(*kinds: str):
    """Every method on each of these kinds of rows that it has, quick as QUICK_KIND says."""
    cases = [(name, kind) for name in CASES for kind in KINDS[name] if kind in kinds]
    marks = {case: () if case in QUICK_KIND.items() else pytest.mark.long for case in cases}
    return pytest.mark.parametrize(
        "name, kind", [pytest.param(*case, marks=marks[case]) for case in cases]
    )


def test_every_method_has_a_case_here():
    named = {name: type(method) for name, (method, _) in CASES.items()}
    assert named | {"squid": Squid} == METHODS
    assert all(CASES[name][0].mixes for name in set(CASES) - set(DEFINED))


def test_squid_is_dense_attention_that_needs_documents():
    own = {name for name in vars(Squid) if not name.startswith("__")}
    assert issubclass(Squid, Dense) and own == {"needs_documents"}


# by the program of packed rows that the quick ones of the next test have too
@methods("nsa", "mla", "dsa", "gated_delta")
def test_nothing_leaks(name):
    properties.nothing_leaks(CASES[name][0])


@methods("nsa", "mla", "dsa", "gated_delta")
def test_prefill_and_decoding_equal_a_packed_row(name):
    method = CASES[name][0]
    config = properties.model(method).config
    properties.cached_equals_packed(method, functools.partial(model_cache, config, page=PAGE))


@methods("moba", of=DEFINED)
def test_packed_sequences_and_shared_prompts_equal_the_sequences_apart(x64, name):
    """By their definition."""
    properties.packed_equals_separate(*CASES[name])


# in which packed sequences with a shared prompt are; of the others test_trees has the masks
@methods("mla", of=[name for name in CASES if name not in DEFINED])
def test_a_tree_of_any_depth_equals_its_paths_apart(x64, name):
    properties.packed_equals_separate(CASES[name][0], trees=True)


@pytest.mark.parametrize(
    "name, length",
    [("nsa", 150), *(long((name, 150)) for name in DEFINED if name != "nsa")]
    # less than a block
    + [long((name, 7)) for name in ("moba", "nsa")],
)
def test_values_and_gradients_equal_the_definition(x64, name, length):
    properties.equals_its_definition(*CASES[name], length)


@on_rows("documents", "long", "packed")
def test_padding_may_hold_anything(name, kind):
    properties.padding_may_hold_anything(CASES[name][0], kind)


@on_rows("packed", "documents")
def test_tokens_not_seen_may_hold_large_values(name, kind):
    properties.tokens_not_seen_may_hold_large_values(CASES[name][0], kind)


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind) if (name, kind) == ("moba", "segment") else long((name, kind))
        for name in DEFINED
        for kind, (rows, _) in not_finite.UNSEEN.items()
        if rows in KINDS[name]
    ],
)
def test_values_that_are_not_finite_reach_only_those_who_see_them(name, kind):
    not_finite.reaches_only_those_who_see_it(CASES[name][0], kind)


# few queries and many are read in different ways
@pytest.mark.parametrize(
    "name, chunk",
    [
        ("window", 4),
        *(long(case) for case in itertools.product(("dense", "moba", "mla"), (4, 20))),
        *map(long, [("nsa", 4), ("gated_documents", 4), ("sinks", 20)]),
    ],
)
def test_in_pages_too_they_reach_only_those_who_see_them(name, chunk):
    not_finite.reaches_only_those_who_see_it_in_pages(CASES[name][0], chunk)


@pytest.mark.parametrize("name", DEFINED)
def test_decoding_reads_no_more_than_dense_decoding_three_times(name):
    shape = properties.SHAPE
    method = CASES[name][0]
    least = 2 * shape.num_kv_heads * shape.head_dim * 2
    for tokens in (1, 64, 4096):
        found = method.decode_bytes(tokens, shape, "bfloat16")
        means = -(-tokens // PAGE) * shape.num_kv_heads * shape.head_dim * 4
        assert least <= found <= 3 * tokens * least + means


def test_shared_code_knows_no_method_by_name():
    """Nothing outside of ``attention/methods`` may ask which method it has."""
    names = {cls.__name__ for cls in METHODS.values()}
    folders = "attention models rl_code planner sweeps cluster launch experiments".split()
    found = []
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        where = str(path.relative_to(ROOT))
        # the methods, their definitions, and the families whose layers have them
        if where.startswith(("attention/methods/", "models/families/")):
            continue
        if where == "attention/reference.py":
            continue
        text = path.read_text()
        if not any(name in text for name in names):
            continue
        used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
        found += [f"{where}: {name}" for name in sorted(used & names)]
    assert found == []


def test_a_method_is_a_frozen_dataclass_of_settings():
    for cls in METHODS.values():
        assert issubclass(cls, Method) and cls.__dataclass_params__.frozen


def test_layers_of_one_model_may_have_different_settings_of_a_method():
    """Each place of the period has parameters of its own."""
    method = CASES["nsa"][0]
    other = NSA(length=4, stride=2, block=PAGE, picks=2, initial=0, local=1, window=5)
    config = properties.model(method).config
    config = dataclasses.replace(config, num_layers=4, attention=(method, other))
    tokens = properties.ids(0, 40)
    where = properties.separate([40], 40)

    def computed():
        model = Transformer(config, nnx.Rngs(0))
        first = [parameters["k_first"] for _, parameters in model.unstacked()]
        return first, model.hidden(tokens, where.order, where, align=0)

    first, hidden = jax.eval_shape(computed)
    assert [x.shape[0] for x in first] == [8, 4, 8, 4]
    assert hidden.shape == (1, 40, 16)
