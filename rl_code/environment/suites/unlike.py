"""Another value of the same kind than the one that a test expects, made when the test runs.

Where what is expected is not written out, a canary asks for such a value. Only what equals
everything passes both, whatever it looks at in what it is compared with.
"""

from __future__ import annotations

# Expressions of the value v that are never equal to it, by its type. What is of none of these
# becomes an object of its own.
_BY_TYPE = {
    "bool": "not v",
    "int": "v + 1",
    "float": "v + 1 + abs(v) if v - v == 0 else 0.0",
    "str": "v + 'x'",
    "bytes": "v + b'x'",
    "list": "v + [object()]",
    "tuple": "v + (object(),)",
    "set": "v | {object()}",
    "dict": "{**v, object(): 0}",
}
_CASES = " ".join(f"({text}) if type(v) is {kind} else" for kind, text in _BY_TYPE.items())


def unlike(text: str) -> str:
    """The text of an expression whose value is another one than that of the expression ``text``."""
    return f"(lambda v: {_CASES} object())({text})"
