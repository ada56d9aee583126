"""The flag --trust of the entry points that read the config of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from absl import flags

from rl_code.run import trust

FLAG = "--trust"
flags.DEFINE_bool(
    "trust",
    False,
    "The config of the run may name objects and programs outside of this tree, which reading it "
    "then runs. Without the flag they are refused.",
)


def take(argv: Sequence[str]) -> None:
    """Trusts configs where the command line says so; called before the flags are parsed, since
    parsing them reads a config.
    """
    if any(re.fullmatch(r"--?trust(=(true|1))?", argument) for argument in argv):
        trust.everything()


def passed_on() -> list[str]:
    """The flag, for another command, where this one has it."""
    return [FLAG] if trust.given() else []
