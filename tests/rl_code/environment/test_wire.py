"""Values cross the border exactly, and nothing else does."""

from __future__ import annotations

import collections
import enum
import json
import math
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.environment.compare import same
from rl_code.environment.sandbox.inside import wire

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**900), 2**900), st.floats(), st.text(), st.binary(),
    st.complex_numbers(), st.builds(range, st.integers(), st.integers(), st.integers(1)),
)  # fmt: skip
KEYS = st.one_of(st.integers(), st.text(), st.booleans(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_values_arrive_as_they_left(value):
    arrived = wire.loads(wire.dumps(value))
    assert same(arrived, value) or any(part != part for part in numbers(value))


def numbers(value) -> list:
    """All numbers in a value; NaN in a set or a complex number equals nothing."""
    if isinstance(value, list | tuple | set | frozenset):
        return [number for item in value for number in numbers(item)]
    if isinstance(value, dict):
        return [number for pair in value.items() for item in pair for number in numbers(item)]
    return [value] if isinstance(value, int | float | complex) else []


def test_subclasses_arrive_as_what_they_are_made_of():
    class Always(int):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

        def __index__(self):
            return 99

    class Sly(list):
        def __iter__(self):
            return iter([1, 2, 3])

        def __getitem__(self, key):
            return 99

    class Word(str):
        def __str__(self):
            return "other"

    pair = collections.namedtuple("Pair", "x y")
    colour = enum.IntEnum("Colour", "RED")
    value = [Always(5), Sly([0]), Word("true"), pair(1, 2), colour.RED, collections.Counter("aab")]
    arrived = wire.loads(wire.dumps(value))
    assert same(arrived, [5, [0], "true", (1, 2), 1, {"a": 2, "b": 1}])


class Everything:
    """Says that it is everything."""

    def __eq__(self, other):
        return True

    @property
    def __class__(self):
        return list


@pytest.mark.parametrize("value", [object(), len, int, Everything(), (x for x in []), {1: object()}, [Everything()],
                                   float("nan").hex, bytearray(1)])  # fmt: skip
def test_what_is_no_plain_value_does_not_leave(value):
    with pytest.raises(wire.WireError):
        wire.dumps(value)


def test_ints_that_python_would_not_print_do_not_travel():
    assert wire.loads(wire.dumps(-(2**13_999))) == -(2**13_999)
    with pytest.raises(wire.WireError, match="bits"):
        wire.dumps([2**20_000])


def test_cycles_and_depth_end():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(wire.WireError, match="deeper"):
        wire.dumps(cycle)
    with pytest.raises(wire.WireError):
        wire.loads("[" * 100_000 + "]" * 100_000)
    with pytest.raises(wire.WireError):
        wire.loads('{"tuple":[' * 300 + "]}" * 300)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "NaN", "Infinity", '{"a": 1}', '{"tuple": 3}', '{"set": [[]]}', '{"int": 5}', '{"int": "x"}',
     '{"tuple": [], "set": []}', '{"dict": [1]}', '{"float": "x"}', '{"complex": ["1"], "x": 1}', '{"bytes": "0"}',
     '{"range": [1, 2, 0]}', '{"dict": [[{"dict": []}, 1]]}', "1" * 5000, '{"int": "0x' + "f" * 5000 + '"}',
     '{"__class__": "os.system"}', "[1,]", "\ud800"],
)  # fmt: skip
def test_forged_text_is_refused(text):
    with pytest.raises(wire.WireError):
        wire.loads(text)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.one_of(
            st.lists(inner), st.dictionaries(st.sampled_from([*wire.DECODERS, "x"]), inner)
        ),
    )
)
@settings(max_examples=300, deadline=None)  # fmt: skip
def test_any_json_gives_plain_values_or_a_wire_error(data):
    try:
        value = wire.loads(json.dumps(data))
    except wire.WireError:
        return
    assert_plain(value)


def assert_plain(value):
    assert type(value) in (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        list,
        tuple,
        set,
        frozenset,
        dict,
        range,
    )
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            assert_plain(item)
    if isinstance(value, dict):
        for pair in value.items():
            assert_plain(pair)


def test_frames_of_any_size_arrive_whole_and_too_long_ones_are_refused():
    left, right = socket.socketpair()
    with left, right:
        texts = ["", "é" * 10, "x" * 1_000_000]
        sender = threading.Thread(
            target=lambda: [wire.write_frame(left, text) for text in [*texts, "y" * 11]]
        )
        sender.start()
        assert [wire.read_frame(right, 1_000_000) for _ in texts] == texts
        with pytest.raises(wire.WireError, match="11 bytes"):
            wire.read_frame(right, 10)
        sender.join()
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(b"\x05\x00\x00\x00ab")
        with pytest.raises(wire.WireError, match="closed inside"):
            wire.read_frame(right, 10)
        assert wire.read_frame(right, 10) is None


def test_not_a_number_is_itself_on_arrival():
    assert (
        math.isnan(wire.loads(wire.dumps(math.nan)))
        and wire.loads(wire.dumps(-math.inf)) == -math.inf
    )
    assert math.copysign(1, wire.loads(wire.dumps(-0.0))) == -1
