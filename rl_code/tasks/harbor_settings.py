"""Settings of a task in Harbor's format: what task.toml says that matters here.

Defaults are those of the package harbor 0.26, whose models a test compares with this reader. What
would make Harbor do something that is not done here is refused by its name: several steps, a
verifier with an environment of its own, another system than Linux, variables of the host.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_code.tasks.source import NoTask, read_text

CONFIG = "task.toml"
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
# Lines above an instruction that mark it for those who filter training data.
_CANARY_LINE = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_IGNORE = ".harborignore"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a task."""

    # Wall-clock seconds of test.sh, and of the agent; None for no limit of the task's own.
    verifier_s: float
    agent_s: float | None
    # Name of its image; "" for that of its Dockerfile.
    image: str
    # Folder that commands start in; "" for that of the image.
    workdir: str
    # Variables of all commands, of test.sh, and of solve.sh.
    environment: Mapping[str, str]
    verifier_environment: Mapping[str, str]
    solution_environment: Mapping[str, str]


def read_settings(folder: Path) -> Settings:
    """The settings of a task's folder. Raises NoTask."""
    try:
        found: Mapping[str, Any] = tomllib.loads(read_text(folder / CONFIG))
    except tomllib.TOMLDecodeError as error:
        raise NoTask(f"{CONFIG} is no TOML: {error}") from error
    verifier, agent, environment, solution = (
        _section(found, name) for name in ("verifier", "agent", "environment", "solution")
    )
    if found.get("steps"):
        raise NoTask(f"{CONFIG}: steps: only tasks of one step are read")
    if "environment" in verifier or verifier.get("environment_mode") == "separate":
        raise NoTask(f"{CONFIG}: verifier.environment: test.sh runs in the task's own world alone")
    system = _read(environment, "environment", "os", "linux", str)
    if system.lower() != "linux":
        raise NoTask(f"{CONFIG}: environment.os = {system!r}: only linux is run")
    ignores = [path for path in folder.rglob(_IGNORE) if path.is_file()]
    if ignores:
        raise NoTask(f"{ignores[0].relative_to(folder)} cannot be followed: take its files away")
    agent_s = _seconds(agent, "agent", math.inf)
    return Settings(
        verifier_s=_seconds(verifier, "verifier", 600.0),
        agent_s=None if agent_s == math.inf else agent_s,
        image=_read(environment, "environment", "docker_image", "", str),
        workdir=_read(environment, "environment", "workdir", "", str),
        environment=_variables(environment, "environment"),
        verifier_environment=_variables(verifier, "verifier"),
        solution_environment=_variables(solution, "solution"),
    )


def read_instruction(folder: Path) -> str:
    """Text that the agent is asked, without the lines above it that mark it. Raises NoTask."""
    lines = read_text(folder / "instruction.md").split("\n")
    while lines and _CANARY_LINE.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()


def _section(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = found.get(name, {})
    if not isinstance(section, dict):
        raise NoTask(f"{CONFIG}: {name} = {section!r} must be a table")
    return section


def _read[T](section: Mapping[str, Any], name: str, key: str, default: T, kind: type[T]) -> T:
    value = section.get(key, default)
    if not isinstance(value, kind):
        raise NoTask(f"{CONFIG}: {name}.{key} = {value!r} must be a {kind.__name__}")
    return value


def _seconds(section: Mapping[str, Any], name: str, default: float) -> float:
    value = section.get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise NoTask(f"{CONFIG}: {name}.timeout_sec = {value!r} must be a number above 0")
    return float(value)


def _variables(section: Mapping[str, Any], name: str) -> dict[str, str]:
    """The variables that a section sets. Raises NoTask for one that the host would have to give."""
    values = _read(section, name, "env", {}, dict)
    found = {}
    for key, value in values.items():
        if not isinstance(value, str):
            raise NoTask(f"{CONFIG}: {name}.env.{key} = {value!r} must be a text")
        if not re.fullmatch(r"\w+", key) or "\0" in value:
            raise NoTask(f"{CONFIG}: {name}.env: {key!r} = {value!r} is no variable")
        if (match := _VARIABLE.fullmatch(value)) is not None:
            if match.group(2) is None:
                raise NoTask(
                    f"{CONFIG}: {name}.env.{key} = {value!r}: nothing of this machine's variables "
                    "is shown to a task; write a default, ${NAME:-value}, which is taken"
                )
            value = match.group(2)
        found[key] = value
    return found
