"""The command line of the entry points that take no config, and what all of them print."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import rich.console
from absl import app, flags
from absl import logging as absl_logging

from launch import asks_for_help, endings, hear_interrupts, usage
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import INTERRUPTED
from rl_code.run.workdir import CONFIG_FILE
from rl_code.text.shell import command_line

ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(
    f"{ROOT / name}/"
    for name in (
        "launch",
        "people",
        "cluster",
        "planner",
        "sweeps",
        "rl_code",
        "models",
        "attention",
    )
)


def run(main: Callable[[list[str]], Any], *, arguments: bool = False) -> NoReturn:
    """Parses the command line, calls ``main(argv)`` and exits.

    arguments: whether the command takes words that are no flags, which ``main`` checks. Errors that
    ``endings`` knows end in one line on standard error; any other one is a bug and keeps its
    traceback.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
            check_numbers()
        except flags.Error as error:
            words = " ".join(str(error).split()).rstrip(" .?")
            refuse(f"{words}; --help lists the flags")
        if rest[1:] and not arguments:
            refuse(
                f"{' '.join(rest[1:])!r} is not a flag; flags look like --workdir=runs/first, and "
                "--help lists them"
            )
        return rest

    def guarded(argv: list[str]) -> Any:
        hear_interrupts()
        try:
            return main(argv)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            if (told := endings.ending(error)) is None:
                raise
            print(" ".join(told[0].split()), file=sys.stderr)
            return told[1]

    if asks_for_help(sys.argv[1:]):
        usage.show(console(), None, config=False)
        sys.exit(0)
    keep_ours()
    app.run(guarded, flags_parser=parse)


def check_numbers() -> None:
    """Raises flags.Error for a number that the command line gives as nan or inf, which bounds let
    pass. Keys of a config are checked where they are read.
    """
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        given = flags.FLAGS[name].present and not name.startswith("config.")
        if given and isinstance(value, float) and not math.isfinite(value):
            raise flags.IllegalFlagValueError(f"flag --{name}={value}: it must be a finite number")


def refuse(text: str) -> NoReturn:
    """Ends the program because its command line is wrong; starting it again does not help."""
    print(text, file=sys.stderr)
    sys.exit(2)


def workdir_of(argv: Sequence[str], config: str) -> Path:
    """The workdir of a run of ``config``, a command's only argument. Ends the program with code 2
    where it is none.
    """
    wanted = f"the workdir of a run of {config} that has its warm start"
    if len(argv) != 2:
        refuse(f"{len(argv) - 1} arguments were given; the only one is {wanted}")
    if not (Path(argv[1]) / CONFIG_FILE).is_file():
        refuse(f"{argv[1]} holds no run; name {wanted}")
    return Path(argv[1])


def object_of(flag: str, text: str) -> dict[str, Any]:
    """The object that a flag gives as JSON. Raises ConfigError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--{flag}={text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--{flag}={text!r} must be an object")
    return found


def config_file(value: str) -> str:
    """The value of --config, with a file of the project's own found from any folder.

    value: <file>[:<argument>].
    """
    file, colon, argument = value.partition(":")
    own = ROOT / file
    return value if Path(file).is_file() or not own.is_file() else f"{own}{colon}{argument}"


def config_of_file(path: Path, argument: str) -> Any:
    """The config that a file gives, for commands that take no keys. Raises ConfigError."""
    spec = importlib.util.spec_from_file_location("config_of_command", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path}: no such config file")
    module = importlib.util.module_from_spec(spec)
    with endings.running_config_file(str(path)):
        spec.loader.exec_module(module)
        return module.get_config(argument) if argument else module.get_config()


def shown(module: str, *words: str) -> str:
    """A command of this project as a shell takes it."""
    return command_line(["python", "-m", module, *words])


def console() -> rich.console.Console:
    """Console for tables: as wide as the terminal, or wide enough for them in a file or pipe."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 132)


def keep_ours() -> None:
    """Leaves out what libraries log, but for their warnings."""
    absl_logging.get_absl_handler().addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Keeps libraries' chatter out of the output, and Orbax's traceback of an error that it also
    raises.
    """
    if record.pathname.startswith(_OURS):
        return True
    return record.levelno >= logging.WARNING and not (
        record.levelno == logging.ERROR and "orbax" in record.pathname
    )
