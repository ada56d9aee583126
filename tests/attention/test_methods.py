"""Every method of METHODS has every property; a new one is tested by an entry in CASES. Squid is
dense attention, whose properties on documents are tested as those of dense.
"""

from __future__ import annotations

import ast
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import reference
from attention.methods.api import METHODS
from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from attention.methods.method import Method
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.sinks import Sinks
from attention.methods.squid import Squid
from attention.methods.window import Window
from models.paged import model_cache
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


# Small settings of every method, and its definition.
CASES = {
    "dense": (Dense(), dense),
    "window": (Window(7), dense),
    "moba": (MoBA(block=PAGE, picks=2), moba),
    "nsa": (NSA(length=8, stride=4, block=PAGE, picks=3, initial=1, local=1, window=10), nsa),
    "gated_documents": (GatedDocuments(), gated_documents),
    "sinks": (Sinks(7), sinks),
}


def long(value):
    """A case that is beyond the quick ones."""
    return pytest.param(value, marks=pytest.mark.long)


every_method = pytest.mark.parametrize("name", CASES)


def test_every_method_has_a_case_here():
    # those that keep a state have tests of their own (``test_gated_delta``)
    known = {name: method for name, method in METHODS.items() if not method.mixes}
    assert {name: type(method) for name, (method, _) in CASES.items()} | {"squid": Squid} == known


def test_squid_is_dense_attention_that_needs_documents():
    own = {name for name in vars(Squid) if not name.startswith("__")}
    assert issubclass(Squid, Dense) and own == {"needs_documents"}


@every_method
def test_nothing_leaks(name):
    properties.nothing_leaks(CASES[name][0])


@pytest.mark.parametrize(
    "name", ["window", *map(long, ("dense", "moba", "nsa", "gated_documents", "sinks"))]
)
def test_packed_sequences_and_shared_prompts_equal_the_sequences_apart(x64, name):
    properties.packed_equals_separate(CASES[name][0])


QUICK_WAYS = [("window", np.inf), ("nsa", np.nan)]


@pytest.mark.parametrize(
    "name, poison",
    [
        pytest.param(*case, marks=() if case in QUICK_WAYS else pytest.mark.long)
        for case in itertools.product(CASES, (np.nan, np.inf))
    ],
)
def test_prefill_and_decoding_equal_the_full_forward(name, poison):
    method = CASES[name][0]
    config = properties.model(method).config
    cache = functools.partial(model_cache, config, page=PAGE)
    properties.cached_equals_full(method, cache, poison)


@pytest.mark.parametrize("length", [150, long(7)])
@pytest.mark.parametrize(
    "name", ["moba", "nsa", "gated_documents", "sinks", *map(long, ("dense", "window"))]
)
def test_values_and_gradients_equal_the_definition(x64, name, length):
    properties.equals_its_definition(*CASES[name], length)


# every method with one of these rows, by turns
TURNS = set(zip(CASES, itertools.cycle(["documents", "short"])))


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(*case, marks=() if case in TURNS else pytest.mark.long)
        for case in itertools.product(CASES, ["short", "documents", "long", "packed"])
    ],
)
def test_padding_may_hold_anything(name, kind):
    properties.padding_may_hold_anything(CASES[name][0], kind)


@every_method
@pytest.mark.parametrize("kind", ["packed", "documents"])  # in which all kinds of unseen tokens are
@pytest.mark.quick(first=1)
def test_tokens_not_seen_may_hold_large_values(name, kind):
    properties.tokens_not_seen_may_hold_large_values(CASES[name][0], kind)


@pytest.mark.parametrize(
    "name", ["moba", *map(long, ("dense", "window", "nsa", "gated_documents", "sinks"))]
)
@pytest.mark.parametrize("kind", ["future", *map(long, ("segment", "document"))])
def test_values_that_are_not_finite_reach_only_those_who_see_them(name, kind):
    not_finite.reaches_only_those_who_see_it(CASES[name][0], kind)


@every_method
@pytest.mark.parametrize("chunk", [4, 20])
@pytest.mark.quick(first=1)
def test_in_pages_too_they_reach_only_those_who_see_them(name, chunk):
    not_finite.reaches_only_those_who_see_it_in_pages(CASES[name][0], chunk)


@every_method
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
        used = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        found += [f"{where}: {name}" for name in sorted(used & names)]
    assert found == []


def test_a_method_is_a_frozen_dataclass_of_settings():
    for cls in METHODS.values():
        assert issubclass(cls, Method) and cls.__dataclass_params__.frozen


@pytest.mark.long
def test_layers_of_one_model_may_have_different_settings_of_a_method(x64):
    """Each place of the period has parameters of its own."""
    method = CASES["nsa"][0]
    other = NSA(length=4, stride=2, block=PAGE, picks=2, initial=0, local=1, window=5)
    model = properties.small_model((method, other), num_layers=4)
    tokens = properties.ids(0, 40)
    where = properties.sequences(jnp.array([40]), 40)
    layers = model.unstacked()
    assert [x["k_first"].shape[0] for _, x in layers] == [8, 4, 8, 4]
    assert jax.jit(lambda m: m.hidden(tokens, where.order, where, align=0))(model).shape == (
        1,
        40,
        16,
    )
