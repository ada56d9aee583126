"""Values come back exactly, equal ones have equal bytes, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl_code import types
from rl_code.store import serialization
from tests.rl_code.store.groups import identical

ROOT = Path(__file__).resolve().parents[3]
BITS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**20_000), 2**20_000),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]),
    st.floats(), BITS, st.text(st.characters()), st.binary(), st.complex_numbers(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
)  # fmt: skip
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary()),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner)),
    max_leaves=5,
)
ARRAYS = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(),
        hnp.complex_number_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        SCALARS, ARRAYS, st.floats(width=32).map(np.float32), st.integers(-100, 100).map(np.int16)
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=120, deadline=None)
def test_values_come_back_as_they_were(value):
    data = serialization.dumps(value)
    back = serialization.loads(data)
    assert identical(back, value) and serialization.dumps(back) == data


def test_every_order_and_bit_of_an_array_is_kept():
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    base.view(np.uint32)[0, 0, 0] = 0x7F801234  # a signalling NaN
    for array in (
        base,
        base.T,
        base[:, ::2],
        np.asfortranarray(base),
        base.astype(">f4"),
        np.array(3, np.int8),
    ):
        back = serialization.loads(serialization.dumps(array))
        assert (back.dtype, back.shape, back.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
        assert back.flags.writeable


@pytest.mark.long
def test_there_is_no_limit_on_depth():
    deep = ()
    for _ in range(100_000):
        deep = ([deep],)
    back = serialization.loads(serialization.dumps(deep))
    for _ in range(100_000):
        ((back,),) = back
    assert back == ()


def test_equal_sets_have_equal_bytes_in_every_process():
    sets = "{'seen': {'a', 'bc', 'def', 1, (2, 'x')}, 'nested': {frozenset({'p', 'q'}), 0, 8}}"
    script = f"from rl_code.store.serialization import dumps; print(dumps({sets}).hex())"
    # texts have other hashes there
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "1"},
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.strip() == serialization.dumps(eval(sets)).hex() and len(done.stdout) > 50


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [object(), len, Colour.RED, bytearray(1), np.array(["a"]), np.array([None]), np.datetime64(1, "s"),
     jnp.zeros(2, jnp.bfloat16), np.asarray(jnp.zeros(2, jnp.bfloat16)), jnp.zeros(2), {1: [object()]}],
)  # fmt: skip
def test_what_cannot_be_kept_exactly_is_refused(value):
    with pytest.raises(TypeError, match="cannot be recorded"):
        serialization.dumps(value)


def test_bytes_that_are_no_value_are_refused():
    whole = serialization.dumps({"a": [1, (2, 3)], "b": np.arange(3)})
    for wrong in (
        b"",
        whole + serialization.dumps(1),
        b"\xc1",
        b"\xd4\x63\x00",
        json.dumps([1]).encode(),
    ):
        with pytest.raises(ValueError, match="not a value"):
            serialization.loads(wrong)
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="not a value"):
            serialization.loads(whole[:end])


def test_a_task_without_a_world_has_the_bytes_it_had_before_there_were_worlds():
    task = types.Task(
        id="a/1",
        messages=({"role": "user", "content": "x"},),
        files={"a.py": "1"},
        path="a.py",
        entry_point="f",
        visible_tests=types.Tests(cases=(types.Case((1,), 2),)),
        hidden_tests=types.Tests(code=("assert f(1) == 2",)),
        reference={},
        meta={"source": "s"},
    )
    data = serialization.dumps(task)
    digest = "5a50fb0b028d40e4fb5db011c086f86859166377d55fc8979a19165ea483a61c"
    assert hashlib.sha256(data).hexdigest() == digest
    assert serialization.loads(data) == task
    layers = (types.Layer("sha256:" + "0" * 64, "/"),)
    world = types.World(layers, "/repo", {"PATH": "/bin"})
    task = dataclasses.replace(task, world=world)
    assert serialization.loads(serialization.dumps(task)) == task
