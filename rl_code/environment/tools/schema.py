"""Types of arguments, read from the JSON schema of a function: the one reader for tools of this
project, of MCP servers and of clients of the endpoint.

A schema may come from anybody. Nothing here raises, whatever it holds, and each part of it is read
once. References lead only into the schema itself.
"""

from __future__ import annotations

import collections
import decimal
import json
import math
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Types of JSON schema, and what a value of each must be. A bool is no number.
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
# Most characters of a number's text, and most digits of an integer. Calls are checked for a smaller
# range.
_LONGEST_NUMBER = 400
_MOST_DIGITS = 100
# Depth to which the parts of a schema are followed.
_DEEPEST = 32
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


class Arguments:
    """The arguments that a function takes, and their types.

    function: a function schema in OpenAI's form, ``{"name": ..., "parameters": {...}}``.
    """

    def __init__(self, function: Mapping[str, Any]):
        self._root = function.get("parameters")
        # Results for parts of the schema that were looked at before, by their identity.
        self._kinds: dict[int, tuple[str, ...] | None] = {}
        self._found: dict[int, tuple[dict[str, Any], tuple[str, ...]]] = {}
        self.properties, self.required = self._members(self._root)
        # What arguments of other names are. Patterns of names are not followed: matching one may
        # take forever.
        others = self._root.get("additionalProperties") if isinstance(self._root, Mapping) else None
        self._others = others if isinstance(others, Mapping) else None

    @property
    def is_object(self) -> bool:
        """False where the schema says that the arguments are no object."""
        kinds = self._kinds_of(self._root)
        return kinds is None or "object" in kinds

    @property
    def refers(self) -> bool:
        """True if the schema is that of a part of its own, which ``$ref`` names."""
        return isinstance(self._root, Mapping) and isinstance(self._target(self._root), Mapping)

    def kinds(self, name: str) -> tuple[str, ...]:
        """The types that an argument may have; all of them where the schema names none."""
        return self._kinds_of(self._schema(name)) or tuple(TYPES)

    def takes(self, name: str) -> bool:
        """True if the schema says what an argument of this name is."""
        return name in self.properties or self._others is not None

    def read(self, name: str, text: str) -> Any:
        """The value of an argument that is written as text, without quotes. The text itself where
        it spells no value of another type that the argument may have.
        """
        kinds = self.kinds(name) if self.takes(name) else ("string",)
        spelled = text.strip()
        if "null" in kinds and spelled == "null":
            return None
        if "boolean" in kinds and spelled.lower() in ("true", "false"):
            return spelled.lower() == "true"
        if "integer" in kinds or "number" in kinds:
            number = _number(spelled, whole="number" not in kinds)
            if number is not None:
                return number
        for kind, bracket in (("array", "["), ("object", "{")):
            if kind in kinds and spelled.startswith(bracket):
                try:
                    return load_json(spelled)
                except (ValueError, RecursionError, MemoryError):
                    return text
        return text

    def normal(self, name: str, value: Any) -> Any:
        """The value of an argument as JSON has it; 12.0 becomes 12 where an integer must stand."""
        if type(value) is float and value.is_integer() and self.takes(name):
            kinds = self.kinds(name)
            if "integer" in kinds and "number" not in kinds:
                return int(value)
        return value

    def accepts(self, name: str, value: Any) -> bool:
        """True if a value has one of the types of an argument."""
        return any(type(value) in TYPES[kind] for kind in self.kinds(name))

    def _schema(self, name: str) -> Any:
        """The schema of an argument; None where there is none."""
        return self.properties.get(name, self._others)

    def _members(self, schema: Any, depth: int = 0) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Properties of an object's schema and the names that are required, those of the parts that
        it is made of included.
        """
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return {}, ()
        if id(schema) in self._found:
            return self._found[id(schema)]
        self._found[id(schema)] = {}, ()  # a schema that leads to itself adds nothing there
        own = schema.get("properties")
        properties = dict(own) if isinstance(own, Mapping) else {}
        needed = schema.get("required")
        required = [name for name in needed if isinstance(name, str)] if _listed(needed) else []
        for part in [self._target(schema), *_parts(schema, "allOf")]:
            more, also = self._members(part, depth + 1)
            properties = more | properties
            required += also
        for word in ("anyOf", "oneOf"):
            branches = [self._members(part, depth + 1) for part in _parts(schema, word)]
            for more, _ in branches:
                for name, argument in more.items():
                    known = properties.get(name)
                    both = argument if known in (None, argument) else {"anyOf": [known, argument]}
                    properties[name] = both
            if branches:
                needed = set.intersection(*(set(also) for _, also in branches))
                required += sorted(needed)
        names = tuple(name for name in dict.fromkeys(required) if name in properties)
        self._found[id(schema)] = properties, names
        return properties, names

    def _kinds_of(self, schema: Any, depth: int = 0) -> tuple[str, ...] | None:
        """The types that a schema allows; None where it says nothing, or is being read already."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return None
        if id(schema) in self._kinds:
            return self._kinds[id(schema)]
        self._kinds[id(schema)] = None  # a schema that leads to itself says nothing there
        found = [
            _named(schema),
            _of_values(schema),
            self._kinds_of(self._target(schema), depth + 1),
        ]
        found += [self._kinds_of(part, depth + 1) for part in _parts(schema, "allOf")]
        for word in ("anyOf", "oneOf"):
            # false allows nothing
            parts = [part for part in _parts(schema, word) if part is not False]
            branches = [self._kinds_of(part, depth + 1) for part in parts]
            if branches and None not in branches:
                found.append(tuple(dict.fromkeys(kind for one in branches for kind in one)))
        kinds = _common([one for one in found if one])
        if kinds and schema.get("nullable") is True:
            kinds = tuple(dict.fromkeys((*kinds, "null")))
        self._kinds[id(schema)] = kinds
        return kinds

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """The schema that ``$ref`` names; None where there is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        beginning, *steps = urllib.parse.unquote(reference[1:]).split("/")
        place = self._root
        if beginning:
            place = self._anchored(beginning)
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping):
                place = place.get(step)
            elif _listed(place) and step.isdecimal() and int(step[:6]) < len(place):
                place = place[int(step[:6])]
            else:
                return None
        return place

    def _anchored(self, name: str) -> Any:
        """The definition of the schema that ``$anchor`` gives a name; None where there is none."""
        root = self._root if isinstance(self._root, Mapping) else {}
        for word in ("$defs", "definitions"):
            parts = root.get(word)
            for part in parts.values() if isinstance(parts, Mapping) else ():
                if isinstance(part, Mapping) and part.get("$anchor") == name:
                    return part
        return None


def unknown_types(schema: Any) -> list[str]:
    """Names of types in a schema that JSON schema does not have, such as "int"; the parts that it
    is made of included, those of its values not.
    """
    unknown = []
    seen: set[int] = set()
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        unknown += [
            str(name) for name in _names(part) if not isinstance(name, str) or name not in TYPES
        ]
        pending += [one for word in ("allOf", "anyOf", "oneOf") for one in _parts(part, word)]
    return unknown


def is_deeper(value: Any, levels: int) -> bool:
    """True if a value of JSON has more levels than these; a number or a text has one."""
    level = [value]
    for _ in range(levels):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def load_json(text: str) -> Any:
    """The value that a text is in JSON. Raises ValueError, also for numbers that JSON does not have
    (NaN, Infinity, 1e999), and RecursionError or MemoryError for what has no end.
    """
    return _JSON.decode(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key[:40]!r} stands twice in an object")
    return found


def json_decoder(*, repeated: bool) -> json.JSONDecoder:
    """A decoder that reads as ``load_json`` says. repeated: whether an object may have a key more
    than once, of which the last counts; else ValueError.
    """
    hook = None if repeated else _once
    return json.JSONDecoder(parse_float=_finite, parse_constant=_refuse, object_pairs_hook=hook)


_JSON = json_decoder(repeated=True)


def _number(text: str, *, whole: bool) -> int | float | None:
    """The number that a text spells. whole: only an integer, which 12.0 and 1e5 are too. None for
    anything else, and for what is too large to be one.
    """
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    exact = decimal.Decimal(text)
    if exact.adjusted() >= _MOST_DIGITS:
        return None
    if text.lstrip("+-").isdecimal():
        return int(text)
    if not whole:
        return float(text)
    return int(exact) if exact == exact.to_integral_value() else None


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _parts(schema: Mapping[str, Any], word: str) -> Iterator[Any]:
    found = schema.get(word)
    return iter(found if _listed(found) else ())


def _names(schema: Mapping[str, Any]) -> Sequence[Any]:
    """All that ``type`` names."""
    kind = schema.get("type")
    return [kind] if isinstance(kind, str) else kind if _listed(kind) else []


def _named(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that ``type`` names and JSON schema has."""
    return tuple(name for name in _names(schema) if isinstance(name, str) and name in TYPES)


def _of_values(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types of the values that ``enum`` or ``const`` names."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not _listed(values):
        return ()
    kinds = (next((k for k, t in TYPES.items() if type(value) in t), None) for value in values)
    return tuple(dict.fromkeys(kind for kind in kinds if kind))


def _common(found: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The types that all of several lists have, in the order of the first; an integer is a number.
    The first list where they have none in common.
    """
    if not found:
        return None
    allowed = [{*kinds, "integer"} if "number" in kinds else {*kinds} for kinds in found]
    first = found[0] if "number" not in found[0] else (*found[0], "integer")
    both = tuple(dict.fromkeys(kind for kind in first if all(kind in one for one in allowed)))
    if "number" in both:
        both = tuple(kind for kind in both if kind != "integer")
    return both or found[0]
