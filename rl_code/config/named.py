"""Names in a config: an entry of a family's dict, or ``package.module:object`` from anywhere.

Each family (losses, advantages, rewards, tools, protocols, sources of tasks, methods of attention,
suites, metrics) is one visible dict. Its values are the members, or ``package.module:object`` where
a run needs few of many: these are imported when asked for. A config may also name a member from a
package of the user's own, without any edit of this tree. A member with settings is a frozen
dataclass. Its fields are the settings, which are checked like every other part of a config, and a
method does the work. A member without settings is the object itself.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from rl_code.config import read_config
from rl_code.config.read_config import ConfigError

# Of a section that is written out as a text.
_MOST_LETTERS = 4096


@dataclasses.dataclass(frozen=True)
class Named:
    """Choice of a member of a family in a config: ``"name"``, or ``dict(name=..., **settings)``."""

    # A key of the family's dict, or ``package.module:object``.
    name: str
    # Values for the fields of the member's dataclass; empty for a member without settings.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        # a mapping has no hash of its own; equal settings have equal hashes in any order
        return hash((self.name, frozenset(self.settings)))

    @classmethod
    def from_config(cls, value: Any, path: str) -> Named:
        """Reads a name, or a section with the key ``name`` whose other keys are settings. The
        command line, to which a name is a text, may write such a section as a text too.

        Raises:
          ConfigError: ``value`` is neither; names ``path``.
        """
        section = value.to_dict() if hasattr(value, "to_dict") else value
        if isinstance(value, str):
            section = section_in(value)
            if section is None:
                return cls(value)
        if isinstance(section, Mapping) and isinstance(section.get("name"), str):
            rest = {key: item for key, item in section.items() if key != "name"}
            # the form that ``config.to_dict`` writes
            if set(rest) == {"settings"} and isinstance(rest["settings"], Mapping):
                rest = dict(rest["settings"])
            return cls(section["name"], rest)
        raise ConfigError(
            f"{path} = {section!r}: expected a name, package.module:object, or a section with the "
            "key name and the member's settings"
        )


def section_in(text: str) -> Mapping[str, Any] | None:
    """The section that a text writes out as Python does, {"name": ...}; None for another text."""
    # a bound, since a config may come from anybody
    if not text.startswith("{") or len(text) > _MOST_LETTERS:
        return None
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        found = ast.literal_eval(text)
        return found if isinstance(found, Mapping) else None
    return None


def reads_as_object(text: str) -> bool:
    """True if a text has the form ``package.module:object``."""
    module, colon, attributes = text.partition(":")
    parts = (*module.split("."), *attributes.split("."))
    return bool(colon) and all(part.isidentifier() for part in parts)


def find(family: Mapping[str, Any], name: str, path: str) -> Any:
    """The object that a config's ``name`` stands for.

    path: dotted key of the config, for messages.

    Raises:
      ConfigError: no such entry, module or object; says what there is.
    """
    if ":" not in name:
        if name in family:
            member = family[name]
            return find({}, member, path) if isinstance(member, str) else member
        near = difflib.get_close_matches(name, family, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{path} = {name!r}: expected one of {', '.join(map(repr, sorted(family)))}, or "
            f"package.module:object.{hint}"
        )
    # before the import: what reads like no object is no reason to run a module (``trust``)
    if not reads_as_object(name):
        raise ConfigError(f"{path} = {name!r}: expected a name, or package.module:object")
    module_name, _, attributes = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise ConfigError(
            f"{path} = {name!r}: there is no module {error.name!r} on Python's path"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(f"{path} = {name!r}: {module_name} has no {attributes!r}")
        found = getattr(found, attribute)
        if inspect.ismodule(found):  # an import of the module's own
            raise ConfigError(f"{path} = {name!r}: {attribute!r} is a module; name it itself")
    return found


def make(family: Mapping[str, Any], named: Named, path: str) -> Any:
    """The member of a family with its settings: an instance of its dataclass, or the object itself.

    Raises:
      ConfigError: as ``find``, or settings that the member does not take; names the dotted key.
    """
    member = find(family, named.name, path)
    if isinstance(member, type) and dataclasses.is_dataclass(member):
        return read_config.build(member, named.settings, path)
    if named.settings:
        raise ConfigError(
            f"{path}: {named.name} takes no settings, found {', '.join(sorted(named.settings))}"
        )
    return member
