"""Comparison of a value that a candidate returned with the expected one.

Values arrive from the wire as exact types, so ``==`` on them runs no code of the candidate's.

Two numbers count as equal under a positive tolerance t when

    |value - expected| <= t min(1, |expected|) + 1e-7 |expected| + 1e-12 scale

Below one the tolerance is relative, so that 0 is not accepted for 6.6e-34. Above one it is
absolute, as suites mean it, and the second term forgives the rounding of large numbers. The third
term forgives the small remainder where numbers should cancel to 0: scale is the largest finite
number in the whole expected value, or 1 when all its numbers are 0.

Standard library only: the judge, a process without the rest of the project, imports this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rl_code.environment.sandbox.inside import wire

if TYPE_CHECKING:
    from rl_code.types import Case

_RELATIVE = 1e-7
_CANCELLATION = 1e-12


def accepts(case: Case, value: Any) -> bool:
    """True if ``value`` counts as the one that the case expects.

    Without a tolerance the types must be the same at every depth; a tolerance of 0 asks for ``==``;
    a positive one lets numbers differ as described above.
    """
    if case.tolerance is None:
        return same(value, case.expected)
    if value == case.expected:
        return True
    if case.tolerance == 0:
        return False
    scale = max((abs(number) for number in _numbers(case.expected)), default=0.0) or 1.0
    return _close(value, case.expected, case.tolerance, _CANCELLATION * scale)


def same(a: Any, b: Any) -> bool:
    """Equality that tells types apart at every depth: True is not 1, a list is not a tuple.

    NaN equals NaN. A named tuple counts as a tuple. A function equals nothing, not even
    itself.
    """
    a = _plain(a)
    b = _plain(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        keys = _by_type(a)
        return keys.keys() == _by_type(b).keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, set | frozenset):
        return _by_type(a).keys() == _by_type(b).keys()
    if type(a) is wire.Function:
        return False
    return a == b or (a != a and b != b)


def _plain(value: Any) -> Any:
    """A value whose class did not travel as builtin values that say the same."""
    if type(value) is wire.Named:
        return tuple(value)
    if type(value) is wire.Record:
        return wire.Record, list(wire.fields_of(value).items()), value.__dict__["__kind__"]
    if type(value) is wire.Member:
        return wire.Member, value.kind, value.name, value.value
    return value


def _close(a: Any, b: Any, tolerance: float, floor: float) -> bool:
    """``a == b``, or lists, tuples and dicts of the same shape whose numbers are close."""
    if a == b:
        return True
    if isinstance(a, int | float | complex) and isinstance(b, int | float | complex):
        try:
            size = abs(b)
            allowed = tolerance * min(1.0, size) + _RELATIVE * size + floor
            return abs(a - b) <= allowed < math.inf
        except OverflowError:  # an int beyond the range of float
            return False
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(
            _close(x, y, tolerance, floor) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k], tolerance, floor) for k in a)
    return False


def _numbers(value: Any) -> Iterator[int | float | complex]:
    """The finite numbers in a value that are within the range of floats."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    elif isinstance(value, int | float | complex):
        try:
            if math.isfinite(abs(complex(value))):
                yield value
        except OverflowError:
            return


def _by_type(items: Any) -> dict[Any, None]:
    """The hashable elements as keys that tell types apart at every depth."""
    return dict.fromkeys(map(_typed, items))


def _typed(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple, tuple(map(_typed, key))
    if isinstance(key, frozenset):
        return frozenset, frozenset(map(_typed, key))
    return type(key), key
