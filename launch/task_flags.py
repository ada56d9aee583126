"""Flags of commands that go through the tasks of a source."""

from __future__ import annotations

from typing import Any

from absl import flags

from launch import command
from rl_code.types import Limits

SETTINGS = flags.DEFINE_string("settings", "{}", "Settings of the source, as JSON.")
LAYERS = flags.DEFINE_string("layers", "", "The folder of the layer store, for tasks with worlds.")
FIRST = flags.DEFINE_integer("first", 0, "Only the first so many tasks; 0 for all.", lower_bound=0)
SECONDS = flags.DEFINE_float(
    "seconds", 60.0, "Wall-clock seconds of all tests of a task.", lower_bound=1.0
)


def settings() -> dict[str, Any]:
    """The settings that --settings gives. Raises ConfigError."""
    return command.object_of("settings", SETTINGS.value)


def limits_of_tests() -> Limits:
    """Limits for tests alone: nobody plays."""
    return Limits(
        turns=1,
        tokens=1,
        turn_tokens=1,
        test_runs=1,
        command_s=SECONDS.value,
        grade_s=SECONDS.value,
    )
