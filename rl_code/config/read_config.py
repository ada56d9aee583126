"""Turns the ConfigDict of a config file into frozen dataclasses, and those into JSON.

A config file is data: ``get_config(arg)`` returns a ConfigDict. ``build`` reads it once, into
dataclasses that stand next to the code that uses them. An unknown key, a missing key or a wrong
type is an error that names the dotted key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

_MISSING = object()
# a class has the same at every call, and finding them takes half the time of building a config
_hints = functools.cache(typing.get_type_hints)

# Keys that had another name before, by the last word of the key.
RENAMED = {
    "answer_rows": "result_rows",
    "answer_tokens": "result_tokens",
    "answers": "results",
    "episode_cpu_s": "tools_cpu_s",
    "episode_s": "tools_s",
    "tool_timeout_s": "worker_deadline_s",
}


class ConfigError(ValueError):
    """A config that cannot be used as it is; the message tells the person who wrote it what to
    change.
    """


def follows(key: str, standard: Any) -> Any:
    """A field of a config's dataclass that has the value of another key. The file cannot set it.

    key: the other key. standard: the field's default, for a dataclass that is made outside a run.
    """
    return dataclasses.field(default=standard, metadata={"follows": key})


def refuse(refused: Mapping[str, tuple], where: str) -> None:
    """Raises ConfigError for a key whose value is none that it may have.

    refused: by key its value, and the values that it may have.
    """
    for key, (value, *allowed) in refused.items():
        if value not in allowed:
            raise ConfigError(
                f"config.{key} = {value!r} is not supported {where}; set it to {allowed[0]!r}"
            )


def at_least(section: Any, **least: int) -> None:
    """Checks that fields of a section are at least as large as said. None is always accepted.

    least: the smallest allowed value of each field, by the field's name.

    Raises:
      ValueError: names the first field that is smaller, its value and the smallest allowed one.
    """
    for name, smallest in least.items():
        value = getattr(section, name)
        if value is not None and value < smallest:
            raise ValueError(f"{name}={value} must be at least {smallest}")


def shares(section: Any, *names: str) -> None:
    """Checks that fields of a section, such as probabilities, are from 0 to 1.

    Raises:
      ValueError: names the first field that is not, and its value.
    """
    for name in names:
        value = getattr(section, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value} must be between 0 and 1")


def build[T](
    cls: type[T], config: Mapping[str, Any] | ml_collections.ConfigDict, path: str = "config"
) -> T:
    """Converts a config into the dataclass ``cls``, nested dataclasses included.

    Understands None, bool, int, float, str, Any, Literal, unions, ``tuple[X, ...]`` and ``tuple[X,
    Y]`` (from tuples or lists), ``Mapping[str, X]`` and dataclasses. An int is accepted where a
    float is wanted, a bool never as a number. A field with a default may be left out.

    Raises:
      ConfigError: names the dotted key, the value found and what would be right.
    """
    if not isinstance(config, Mapping | ml_collections.ConfigDict):
        raise ConfigError(
            f"{path} = {config!r}: expected a section with the keys {', '.join(_names(cls))}"
        )
    names = _names(cls)
    sources = {field.name: field.metadata["follows"] for field in _followers(cls)}
    hints = _hints(cls)
    for key in config:
        if key in sources:
            raise ConfigError(
                f"{path}.{key}: no such key; its value is that of config.{sources[key]}"
            )
        if key not in names:
            raise ConfigError(
                f"{path}.{key}: no such key.{_suggest(str(key), names)} {path} has: "
                f"{', '.join(names)}"
            )
    values = {}
    for field in dataclasses.fields(cls):
        if field.name in sources:
            continue
        value = _value(config, field.name)
        if value is not _MISSING:
            values[field.name] = _convert(hints[field.name], value, f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"{path}.{field.name}: missing; expected {describe(hints[field.name])}"
            )
    try:
        return cls(**values)
    except ConfigError:  # it names its key already
        raise
    except ValueError as error:  # the dataclass has checked its values
        raise ConfigError(f"{path}: {error}") from error


def complete(cls: type, config: Mapping[str, Any] | ml_collections.ConfigDict) -> Any:
    """A copy of a config to which the keys are added that its file leaves out.

    The command line can then override every key. An added key has its default; if the default is
    None, it is a placeholder of the key's type. Unknown keys stay, and a missing key without a
    default stays missing: ``build`` raises for both.
    """
    completed = ml_collections.ConfigDict()
    # sections that are not gone into are copied too: a flag changes the copy alone
    plain = ml_collections.ConfigDict(config).copy_and_resolve_references()
    for key in plain:
        if key not in _names(cls):
            completed[key] = plain[key]
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if "follows" in field.metadata:
            continue
        hint = hints[field.name]
        value = _value(plain, field.name)
        if value is _MISSING:
            value = _default(field)
        if value is _MISSING:
            continue
        if isinstance(value, list):  # a tuple can be given on the command line, a list cannot
            value = tuple(value)
        section = section_of(hint)
        if section is not None and isinstance(value, Mapping | ml_collections.ConfigDict):
            value = complete(section, value)
        elif section is not None and isinstance(value, tuple | list):
            value = tuple(complete(section, one) for one in value)
        elif value is None and (scalar := _scalar(hint)) is not None:
            value = ml_collections.config_dict.placeholder(scalar)
        completed[field.name] = value
    return completed


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass or a mapping as nested dicts, lists and scalars.

    They are what one gets by writing it as JSON and reading it back.
    """
    return json.loads(to_json(config))


def to_json(config: Any) -> str:
    """The JSON text of a dataclass or mapping. Keys are sorted, so that equal configs have equal
    texts.
    """
    return json.dumps(_keys_and_values(config), sort_keys=True, indent=2)


def short(value: Any) -> Any:
    """Plain values with names as a config file has them, so that flags can set them.

    A name without settings is a word, and settings stand beside their name.
    """
    if isinstance(value, dict):
        if set(value) == {"name", "settings"}:
            settings = short(value["settings"])
            return {"name": value["name"], **settings} if settings else value["name"]
        return {key: short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [short(inner) for inner in value]
    return value


def diff(a: Any, b: Any, without: Collection[str] = ()) -> list[str]:
    """The dotted keys at which two configs differ, sorted, without the leading ``config.``.

    a, b: dataclasses or nested mappings. A section that only one of them has is one difference,
      named by the section.
    without: keys and whole sections that are not compared.
    """
    found = _diff(to_dict(a), to_dict(b), "")
    return sorted(
        key for key in found if not any(f"{key}.".startswith(f"{other}.") for other in without)
    )


def check_same(there: Any, here: Any, folder: Any, may_change: Collection[str] = ()) -> None:
    """Checks that the config of a run's folder is the one that is given now.

    there, here: the folder's config and the one given now, a dataclass. may_change: keys and whole
    sections that may differ. A key that the folder lacks is newer than the folder. It is no
    difference while it has its default here: the default of a new key must do what was done without
    it. A key that is None where the other lacks it is no difference either.

    Raises:
      ConfigError: names every other key that differs, with both values.
    """
    values = {
        key: (lookup(there, key), lookup(here, key))
        for key in diff(there, here, without=may_change)
    }
    changes = [
        f"{key} = {one!r} there, {other!r} here{_now(key)}"
        for key, (one, other) in values.items()
        if (one is not None or other is not None)
        and not (_find(there, key) is _MISSING and _has_default(here, key))
    ]
    if changes:
        raise ConfigError(
            f"{folder} holds a run of another config: {'; '.join(changes)}. Use another --workdir, "
            "or the same config."
        )


def _now(key: str) -> str:
    """The name that a dotted key has now, in brackets; "" where it has not changed."""
    name = RENAMED.get(key.rpartition(".")[2])
    return f" ({name} now)" if name else ""


def lookup(config: Any, key: str) -> Any:
    """The value at a dotted key of a dataclass or nested mapping; None if there is no such key."""
    value = _find(config, key)
    return None if value is _MISSING else value


def _find(config: Any, key: str) -> Any:
    """The value at a dotted key, or ``_MISSING``."""
    value = to_dict(config)
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _has_default(config: Any, key: str) -> bool:
    """True if a key of a dataclass has the default of its field."""
    *sections, name = key.split(".")
    for section in sections:
        config = getattr(config, section, None)
    if not dataclasses.is_dataclass(config):
        return False  # a section that is free, or off
    for field in dataclasses.fields(config):
        if field.name == name:
            value = short(_keys_and_values(getattr(config, name)))
            default = _default(field)
            return default is not _MISSING and not diff({name: default}, {name: value})
    return False


def _keys_and_values(config: Any) -> Any:
    """A config as nested dicts and lists, with the keys that a config file can set."""
    if dataclasses.is_dataclass(config):
        return {name: _keys_and_values(getattr(config, name)) for name in _names(type(config))}
    if isinstance(config, Mapping):
        return {key: _keys_and_values(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [_keys_and_values(value) for value in config]
    return config


def _diff(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in a.keys() | b.keys():
            found += _diff(
                a.get(key, _MISSING), b.get(key, _MISSING), f"{path}.{key}" if path else key
            )
        return found
    # True and 1, or 1 and 1.0, are different values of a config, though Python calls them equal.
    # NaN is the same value as NaN, though Python calls them different. So types and texts are
    # compared.
    return [] if a is b or (type(a) is type(b) and repr(a) == repr(b)) else [path]


def _names(cls: type) -> list[str]:
    """The keys of a section that a config file can set."""
    return [field.name for field in dataclasses.fields(cls) if "follows" not in field.metadata]


def _followers(cls: type) -> list[dataclasses.Field]:
    """The fields whose value follows from another key (made by ``follows``)."""
    return [field for field in dataclasses.fields(cls) if "follows" in field.metadata]


def _value(config: Mapping[str, Any] | ml_collections.ConfigDict, name: str) -> Any:
    """The value at a key, or ``_MISSING``. A placeholder without a value counts as missing."""
    try:
        return config[name] if name in config else _MISSING
    except ml_collections.config_dict.RequiredValueError:
        return _MISSING


def _default(field: dataclasses.Field) -> Any:
    """A field's default as a config file would write it, or ``_MISSING`` if there is none."""
    if field.default is not dataclasses.MISSING:
        return short(_keys_and_values(field.default))
    if field.default_factory is not dataclasses.MISSING:
        return short(_keys_and_values(field.default_factory()))
    return _MISSING


def section_of(hint: Any) -> type | None:
    """The dataclass that values of a type are built into; None if they are no sections.

    For an optional section or a tuple of sections it is the dataclass of one of them. None if a
    union allows several dataclasses.
    """
    if dataclasses.is_dataclass(hint):
        return None if hasattr(hint, "from_config") else hint
    found = [section_of(member) for member in typing.get_args(hint)]
    found = [section for section in found if section is not None]
    return found[0] if len(found) == 1 else None


def _scalar(hint: Any) -> type | None:
    """Type by which the command line reads a key that may be None.

    As int, float, bool or str; or, where the result is ``object``, as any Python literal. None if
    the key cannot be given on the command line.
    """
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if any(hasattr(member, "from_config") for member in members):
        # text that is no literal is a name, as of a method of attention; a literal is a section or
        # a tuple of sections
        return object
    if len(members) != 1:
        return None
    if dataclasses.is_dataclass(members[0]):
        return object  # a section that is off, which "{'key': value}" switches on
    if typing.get_origin(members[0]) is typing.Literal:
        return type(typing.get_args(members[0])[0])
    return members[0] if members[0] in (int, float, bool, str) else None


def _suggest(key: str, names: list[str]) -> str:
    """The name that a key has now, or a question that offers the most similar one; "" if none is
    similar.
    """
    if RENAMED.get(key) in names:
        return f" It is called {RENAMED[key]!r} now."
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _convert(hint: Any, value: Any, path: str) -> Any:
    """The value of a key as its type, ``hint``. Raises ConfigError, which names ``path``."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return _plain(value)
    if hasattr(hint, "from_config"):  # a type that converts values itself, such as named.Named
        return hint.from_config(value, path)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, path)
    if origin is typing.Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            near = (
                _suggest(value, [choice for choice in arguments if isinstance(choice, str)])
                if isinstance(value, str)
                else ""
            )
            raise ConfigError(f"{path} = {value!r}: expected {describe(hint)}.{near}")
        return value
    if origin is tuple and isinstance(value, tuple | list):
        hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(hints) == len(value):
            return tuple(
                _convert(item_hint, item, f"{path}[{index}]")
                for index, (item_hint, item) in enumerate(zip(hints, value, strict=True))
            )
    elif origin in (dict, Mapping) and isinstance(value, Mapping | ml_collections.ConfigDict):
        return {key: _convert(arguments[1], value[key], f"{path}.{key}") for key in value}
    elif hint is float and type(value) in (int, float) and _is_float(value):
        return float(value)
    elif hint in (int, bool, str, type(None)) and type(value) is (hint or type(None)):
        return value
    raise ConfigError(f"{path} = {_plain(value)!r}: expected {describe(hint)}")


def _is_float(value: float) -> bool:
    """True for what a float can hold, but NaN, which a check of bounds may let through."""
    return abs(value) <= sys.float_info.max or value in (math.inf, -math.inf)


def _convert_union(hint: Any, value: Any, path: str) -> Any:
    """The value as the first member of the union that accepts it."""
    members = typing.get_args(hint)
    complaints = []
    if value is None and type(None) in members:
        return None
    # The member that is the value's own type is tried first, so that 1 stays an int in a key of
    # type ``float | int``.
    for member in sorted(members, key=lambda m: m is not type(value)):
        try:
            return _convert(member, value, path)
        except ConfigError as error:
            complaints.append((member, error))
    structured = [
        error for member, error in complaints if _is_section(member) == _is_section(type(value))
    ]
    # A section was given and only one member is a section: its own complaint says more than that
    # no member accepts the value.
    if _is_section(type(value)) and len(structured) == 1:
        raise structured[0]
    raise ConfigError(f"{path} = {_plain(value)!r}: expected {describe(hint)}")


def _is_section(kind: Any) -> bool:
    """True if a type is that of a section: a dataclass or a mapping."""
    return dataclasses.is_dataclass(kind) or (
        isinstance(kind, type) and issubclass(kind, Mapping | ml_collections.ConfigDict)
    )


def _plain(value: Any) -> Any:
    """A value without ml_collections' types, as error messages show it."""
    return value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value


def describe(hint: Any) -> str:
    """The values that a key of this type accepts, in words."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is type(None):
        return "None"
    if hasattr(hint, "from_config"):
        return "a name"
    if dataclasses.is_dataclass(hint):
        return f"a section with the keys {', '.join(_names(hint))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(member) for member in arguments)
    if origin is typing.Literal:
        return f"one of {', '.join(repr(choice) for choice in arguments)}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a tuple, each item {describe(arguments[0])}"
    if origin is tuple:
        return f"a tuple of {len(arguments)}: {', '.join(describe(item) for item in arguments)}"
    if origin in (dict, Mapping):
        return f"a mapping from names to {describe(arguments[1])}"
    return hint.__name__ if isinstance(hint, type) else str(hint)
