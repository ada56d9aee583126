"""Refuses what would run code of others in a config that was read from a workdir.

A config file in Python is its reader's own program. The ``config.json`` of a run may come from
anybody, and looking at a run must not run what it names: objects outside this tree, an agent's
program, another Python. Nor must it send a key of the environment to a server that it names. A
command with --trust takes all of that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_code.config import named
from rl_code.config.read_config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Its packages. Other folders at its root may be workdirs.
_TREE = {
    *("attention", "benchmarks", "cluster", "configs", "examples", "experiments", "launch"),
    *("models", "pallas_kernels", "people", "planner", "rl_code", "sweeps", "tests"),
}
# Members of families whose process runs what their settings name, and the modules that hold them.
_PROGRAMS = (
    *("program", "verifiers", "command_line"),
    *("codex", "opencode", "claude_code", "aider"),
)
_OF_PROGRAMS = (
    *("rl_code.harness.program", "rl_code.harness.verifiers", "rl_code.tasks.verifiers"),
    *("rl_code.harness.command_line", "rl_code.harness.known_agents"),
)
# Reward signals that ask a server of the config's choice, and the modules that hold them.
_ASKING = ("rubric",)
_OF_ASKING = ("rl_code.rewards.rubric",)

_everything = False


def everything() -> None:
    """Trust all configs from now on."""
    global _everything
    _everything = True


def given() -> bool:
    """True if all configs are trusted."""
    return _everything


def check(config: Any, path: Path) -> None:
    """Raises ConfigError for a config, as JSON, that names what would run code of others.

    path: of its file, for the message.
    """
    if _everything:
        return
    try:
        first = next(_foreign(config, "config"), None)
    except RecursionError:
        raise ConfigError(f"{path} is nested more deeply than any config of a run") from None
    if first is not None:
        key, words = first
        raise ConfigError(
            f"{path}: {key} names {words}, which is not part of this tree; reading a run does not "
            "run code that comes with it. If you trust it, add --trust"
        )


def _foreign(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield what would run code of others: dotted keys, and what is named there."""
    if isinstance(value, str):
        if named.reads_as_object(value) and (_outside(value) or _starts_programs(value)):
            yield key, repr(value)
        yield from _foreign(named.section_in(value), key)
    elif isinstance(value, Mapping):
        if value.get("name") in _PROGRAMS:
            yield key, f"the agent or environment {value['name']!r} with a program of its own"
        settings = value.get("settings", value)
        if value.get("name") in _ASKING and isinstance(settings, Mapping) and settings.get("url"):
            yield key, f"the signal {value['name']!r} that asks {settings['url']!r}"
        if isinstance(python := value.get("python"), str) and python:
            yield f"{key}.python", f"the Python {python!r}"
        for name, inner in value.items():
            yield from _foreign(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _foreign(inner, f"{key}[{at}]")


def _starts_programs(text: str) -> bool:
    """True for an object of this tree that is one of ``_PROGRAMS`` or ``_ASKING``."""
    try:
        found = named.find({}, text, "")
    except ConfigError:  # no object
        return False
    return getattr(found, "__module__", None) in (*_OF_PROGRAMS, *_OF_ASKING)


def _outside(text: str) -> bool:
    """True for an object, ``package.module:object``, whose package does not lie in this tree."""
    top = text.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(top) if top in _TREE else None  # which does not import it
    if found is None:
        return True
    places = [found.origin and Path(found.origin).parent, *(found.submodule_search_locations or ())]
    return any(place and Path(place).resolve() != ROOT / top for place in places)
