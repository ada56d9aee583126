"""When a value that a candidate returned counts as the expected one.

Values arrive from the wire as exact builtin types, so ``==`` on them runs no code of the
candidate's.
"""

from __future__ import annotations

import math
from typing import Any

from rl_code.types import Case

_RELATIVE = 1e-7


def accepts(case: Case, value: Any) -> bool:
    """Whether ``value`` (plain, exact builtin types) is what the case expects, by the case's
    tolerance.
    """
    if case.tolerance is None:
        return same(value, case.expected)
    return close(value, case.expected, case.tolerance)


def same(a: Any, b: Any) -> bool:
    """Equality that tells types apart at every depth: True is not 1, a list is not a tuple. NaN is
    NaN.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        keys = _by_type(a)
        return keys.keys() == _by_type(b).keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, set | frozenset):
        return _by_type(a).keys() == _by_type(b).keys()
    return a == b or (a != a and b != b)


def close(a: Any, b: Any, tolerance: float) -> bool:
    """``a == b``, or the same lists, tuples and dicts of numbers no further apart than
    ``tolerance``.

    A positive tolerance also forgives the rounding of large numbers: a relative difference of 1e-7.
    """
    if a == b:
        return True
    if tolerance == 0:
        return False
    if isinstance(a, int | float | complex) and isinstance(b, int | float | complex):
        try:
            return abs(a - b) <= tolerance + _RELATIVE * abs(b) < math.inf
        except OverflowError:  # an int beyond the range of float
            return False
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key], tolerance) for key in a)
    return False


def _by_type(items: Any) -> dict[Any, None]:
    """The hashable elements as keys that tell types apart at every depth."""
    return dict.fromkeys(map(_typed, items))


def _typed(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple, tuple(map(_typed, key))
    if isinstance(key, frozenset):
        return frozenset, frozenset(map(_typed, key))
    return type(key), key
