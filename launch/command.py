"""The command line of the entry points that take no config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import rich.console
from absl import app, flags

from launch import usage


def run(main: Callable[[list[str]], Any], *, arguments: bool = False) -> NoReturn:
    """Parses the command line, calls ``main(argv)`` and exits.

    arguments: whether the command takes words that are no flags, which ``main`` checks.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            words = " ".join(str(error).split()).rstrip(" .?")
            refuse(f"{words}; --help lists the flags")
        if rest[1:] and not arguments:
            refuse(
                f"{' '.join(rest[1:])!r} is not a flag; flags look like --workdir=runs/first, and "
                "--help lists them"
            )
        return rest

    if wants_help():
        usage.show(console(), None, config=False)
        sys.exit(0)
    app.run(main, flags_parser=parse)


def refuse(text: str) -> NoReturn:
    """Ends the program because its command line is wrong; starting it again does not help."""
    print(text, file=sys.stderr)
    sys.exit(2)


def wants_help() -> bool:
    """Whether the command line asks what the command does."""
    return bool({"--help", "-h", "-help"} & set(sys.argv[1:]))


def console() -> rich.console.Console:
    """Where tables go: as wide as the terminal, or wide enough for them in a file or pipe."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 132)
