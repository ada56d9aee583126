"""Values cross the border exactly, and nothing else does."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import json
import math
import socket
import threading
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.environment.compare import same
from rl_code.environment.sandbox.inside import values, wire

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
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=120, deadline=None)
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


@pytest.mark.parametrize("value", [object(), len, int, Everything(), {1: object()}, [Everything()],
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
     '{"__class__": "os.system"}', "[1,]", "\ud800", '{"decimal": "x"}', '{"fraction": ["1e999999", 1]}',
     '{"fraction": [1, 0]}', '{"date": [2026, 2, 30]}', '{"datetime": [2026]}', '{"timedelta": ["a"]}',
     '{"timezone": [1e99]}', '{"items": [1]}', '{"keys": [[]]}', '{"member": ["A", "B"]}',
     '{"named": ["A", ["x"], []]}', '{"record": ["A", ["x", "x"], [1, 2]]}', '{"record": ["A", [1], [1]]}',
     '{"function": ["x", "f"]}', '{"iterator": 3}'],
)  # fmt: skip
def test_forged_text_is_refused(text):
    with pytest.raises(wire.WireError):
        wire.loads(text)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.one_of(
            st.lists(inner),
            st.dictionaries(st.sampled_from([*wire.SHAPES, *wire.TEXTS, *wire.NAMED, "x"]), inner),
        ),
    )
)
@settings(max_examples=120, deadline=None)  # fmt: skip
def test_any_json_gives_plain_values_or_a_wire_error(data):
    try:
        value = wire.loads(json.dumps(data))
    except wire.WireError:
        return
    assert_plain(value)


PLAIN = (
    type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range,
    type({}.keys()), type({}.values()), type({}.items()), type(iter([])), types.GeneratorType,
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, datetime.timezone, wire.Member, wire.Record, wire.Named, wire.Function,
)  # fmt: skip


def assert_plain(value):
    assert type(value) in PLAIN
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            assert_plain(item)
    if isinstance(value, dict):
        for pair in value.items():
            assert_plain(pair)
    if type(value) is wire.Record:
        assert_plain(wire.fields_of(value))
    if type(value) is wire.Member:
        assert_plain([value.kind, value.name, value.value])


@dataclasses.dataclass
class Point:
    x: int
    y: list


Pair = collections.namedtuple("Pair", "left right")
Colour = enum.Enum("Colour", "RED GREEN")
UTC = datetime.UTC
EXACT = [
    decimal.Decimal("1.10"), decimal.Decimal("-Infinity"), fractions.Fraction(-3, 7),
    datetime.date(2026, 2, 28), datetime.datetime(2026, 2, 28, 23, 59, 1, 5),
    datetime.datetime(2026, 2, 28, tzinfo=UTC), datetime.time(1, 2, fold=1),
    datetime.timedelta(days=-1, microseconds=3), datetime.timezone(datetime.timedelta(hours=-3)),
    {datetime.date(2026, 1, 1): decimal.Decimal(1)}, {fractions.Fraction(1, 2)}, range(1, 9, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_values_of_the_standard_library_arrive_exactly(value):
    arrived = wire.loads(wire.dumps(value))
    assert same(arrived, value) and repr(arrived) == repr(value)
    assert not same(arrived, [value]) and not same(str(value), arrived)


def test_views_and_iterators_arrive_with_their_items():
    data = {"b": 1, "a": 2}
    keys, values, items = wire.loads(wire.dumps([data.keys(), data.values(), data.items()]))
    assert keys == data.keys() and list(keys) == ["b", "a"]
    assert list(values) == [1, 2] and items == data.items()
    made = [iter([1, 2]), (x for x in "ab"), map(abs, [-1]), zip("a", "b"), reversed([1, 2])]  # noqa: B905
    arrived = wire.loads(wire.dumps(made))
    assert [list(one) for one in arrived] == [[1, 2], ["a", "b"], [1], [("a", "b")], [2, 1]]
    assert next(wire.loads(wire.dumps(iter("xy")))) == "x"


def test_an_iterator_without_end_arrives_as_far_as_the_budget():
    arrived = wire.loads(wire.dumps(itertools.count()))
    assert list(itertools.islice(arrived, 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="first 10000 items"):
        list(wire.loads(wire.dumps(itertools.count())))


def test_instances_of_classes_of_ones_own_arrive_by_name():
    point, pair, red = wire.loads(wire.dumps([Point(1, [2]), Pair(3, 4), Colour.RED]))
    assert (point.x, point.y) == (1, [2]) and point == Point(1, [2]) and point != Point(1, [3])
    assert pair == (3, 4) and (pair.left, pair.right) == (3, 4)
    assert (red.kind, red.name, red.value) == ("Colour", "RED", 1)
    again = wire.loads(wire.dumps([Point(1, [2]), Pair(3, 4), Colour.RED]))
    assert same([point, pair, red], again) and same(pair, (3, 4))
    assert not same(point, wire.loads(wire.dumps(Point(True, [2]))))
    assert not same(red, wire.loads(wire.dumps(Colour.GREEN)))


def test_what_came_from_the_other_side_goes_back_as_it_was():
    values = [Point(1, [Colour.RED]), Pair(3, Point(1, [])), Colour.GREEN]
    assert wire.dumps(wire.loads(wire.dumps(values))) == wire.dumps(values)


def test_functions_travel_only_where_both_sides_agree():
    functions = []
    text, lying = wire.write([len, lambda x: x], functions)
    assert functions[0] is len and not lying
    first, second = wire.loads(text)
    assert (first.number, first.name, second.number) == (0, "len", 1) and not same(first, second)
    with pytest.raises(wire.WireError, match="builtin_function_or_method is not a plain value"):
        wire.dumps(len)


NESTED = {
    "list": lambda x: [x], "tuple": lambda x: (x,), "dict": lambda x: {"k": x},
    "key": lambda x: {(x,): 1} if isinstance(x, int | tuple) else {1: x}, "pair": lambda x: Pair(x, 1),
    "point": lambda x: Point(1, x), "view": lambda x: {"k": x}.items(), "iterator": lambda x: iter([x]),
}  # fmt: skip
LEAVES = [1, 1j, "a", 2**60, decimal.Decimal(1), fractions.Fraction(1, 2), datetime.date(2026, 1, 1),
          datetime.datetime(2026, 1, 1, tzinfo=UTC), Colour.RED, range(3), float("nan"), b"a", {1}]  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_whatever_may_be_sent_can_be_read(name):
    """An answer that cannot be read counts as forged, so no honest one may be."""
    sent = set()
    for number, leaf in enumerate(LEAVES):
        for depth in (1, 49, 99, 100, 101):
            value = leaf
            for _ in range(depth):
                value = NESTED[name](value)
            try:
                text = wire.dumps(value)
            except wire.WireError:
                continue
            wire.loads(text)
            sent.add((depth, number))
    assert {(depth, number) for depth in (1, 49) for number in range(len(LEAVES))} <= sent
    assert not any(depth > 100 for depth, _ in sent)


def test_the_reader_counts_no_more_elements_than_the_writer():
    for value in (1j, {"k": 1}, datetime.datetime(2026, 1, 1), Pair(1, 2), {1: 1}.items()):
        text = wire.dumps([value] * 10)
        fewest = next(n for n in range(200) if _fits(value, n))
        assert wire.read(text)[1] <= fewest


def _fits(value, elements) -> bool:
    """Whether a budget of so many elements is enough to write ten such values."""
    writing = values.Writing(elements, None)
    with contextlib.suppress(wire.WireError):
        values.encode([value] * 10, 0, writing)
        return True
    return False


def test_budgets_of_elements_hold_on_both_sides():
    most = wire.MAX_ELEMENTS
    assert len(wire.loads(wire.dumps([0] * most))) == most
    assert len(wire.loads(wire.dumps({i: i for i in range(most // 3)}))) == most // 3
    with pytest.raises(wire.WireError, match="more than"):
        wire.dumps([[0] * (most // 2)] * 2)
    with pytest.raises(wire.WireError, match="more than"):
        wire.loads("[" + "[]," * most + "[]]")


@pytest.mark.parametrize(
    ("value", "lies"),
    [
        ([1, "a", Point(1, []), Pair(1, 2), Colour.RED, collections.Counter("a")], False),
        ([decimal.Decimal(1), collections.OrderedDict(a=1), collections.defaultdict(int)], False),
        ([type("A", (int,), {"__eq__": lambda s, o: True, "__hash__": None})(5)], True),
        ([type("A", (int,), {"__eq__": lambda s, o: type(o) is int, "__hash__": None})(5)], True),
        ({"k": type("A", (list,), {"__eq__": lambda s, o: type(o) is list})([1])}, True),
    ],
)  # fmt: skip
def test_a_value_that_says_it_equals_anything_is_noticed(value, lies):
    assert wire.write(value)[1] is lies


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
