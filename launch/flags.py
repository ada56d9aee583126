"""The command line that every entry point shares: --config=<file>[:<argument>],
--config.<key>=<value>, --workdir.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import sys
import textwrap
import threading
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import ml_collections
from absl import app, flags
from ml_collections import config_flags
from ml_collections.config_flags import config_path

from launch import asks_for_help, endings, hear_interrupts, trusted, usage
from launch.command import check_numbers, config_file, console, keep_ours, refuse
from launch.workdir import WORKDIR
from models.sharding import MeshConfig
from rl_code.checkpoint.checkpoint import CheckpointError
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import INTERRUPTED, Stopped
from rl_code.recording import kept_config
from rl_code.run.workdir import CONFIG_FILE
from rl_code.tasks.row_files import TaskFileError

_LAST_S = 60.0  # that a program which gave up may take to end

try:
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Config file, as in configs/quickstart.py or configs/quickstart.py:smoke; or the "
        "config.json of a run.",
        lock_config=True,
    )
except flags.Error as error:  # the library reads --flagfile here
    refuse(" ".join(str(error).split()))
COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder that keeps compiled programs, so that the next start need not compile them; '' for "
    "none. Unless given, JAX_COMPILATION_CACHE_DIR of the environment, else .jax_cache in the "
    "repository. It may be deleted at any time.",
)
# Compiling for less long than this is not worth a file.
_WORTH_KEEPING_S = 0.2

# How a command begins that a message ends with.
COMMAND = "\n    python -m "

# What ``run_folder`` says.
_run_folder: str | None = None

# An override that switches a part of the config off.
_OFF = re.compile(r"--?config\.[\w.]+=None")


class _Complete(flags.ArgumentParser):
    """Reads a config file and adds the keys that it leaves out, so that each can be overridden.

    reader: finds and loads the file.
    kind: the dataclass that the config fills.
    off: keys given as --config.<section>=None, which switch a part off; a section has no type that
      could read this.
    """

    def __init__(self, reader: flags.ArgumentParser, kind: type, off: Sequence[str]):
        self._reader = reader
        self._kind = kind
        self._off = off

    def parse(self, argument: str) -> ml_collections.ConfigDict:
        if argument.endswith(".json"):  # of a run
            found = ml_collections.ConfigDict(kept_config.as_written(Path(argument)))
        else:
            found = self._reader.parse(argument)
        found.keys()  # a file that could not be found says so on its first use
        config = read_config.complete(self._kind, found)
        self.written = set(dotted(found)) | set(self._off)
        for key in self._off:
            *sections, name = key.split(".")
            section = config
            for part in sections:
                section = section[part]
            with section.ignore_type():
                section[name] = None
        _refuse_keys_of_values(config)
        return config.lock()


def _refuse_keys_of_values(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for an override of a key of what has none: the library fails at a text or a
    tuple in words of its own.
    """
    for argument in sys.argv[1:]:
        key, _, _ = argument.partition("=")
        if not re.match(r"--?config\.", key):
            continue
        key = key.lstrip("-")
        value: Any = {"config": config}
        passed = []
        for part in config_path.split(key):
            sections = isinstance(value, Mapping | ml_collections.ConfigDict)
            elements = isinstance(value, tuple | list) and isinstance(part, int)
            if value is not None and not sections and not elements:
                at = ".".join(passed)
                raise ValueError(
                    f"{at} = {value!r} has no keys, so there is no {key}: give a value as a whole "
                    f"(--{at}=...), or a section in the config file"
                )
            if elements and not -len(value) <= part < len(value):
                raise ValueError(f"{key}: {'.'.join(passed)} has {len(value)} elements, from 0 on")
            if value is None or (sections and part not in value):
                break  # told by the library, with the keys that are like it
            value = value[part]
            passed.append(str(part))


def run(
    main: Callable[[ml_collections.ConfigDict, str | None], Any],
    *,
    kind: type | None = None,
    needs_workdir: bool | Callable[[], bool] = True,
    runs: bool = False,
    expected: tuple[type[Exception], ...] = (),
    lasting: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Parses the command line, calls ``main(config, workdir)`` and exits.

    kind: the dataclass that the config fills; keys that its file leaves out can then be set too.
    needs_workdir: whether --workdir must be given, asked once the flags are known.
    runs: whether the workdir of a run may be given without a flag (``run_folder``). The config is
      that run's unless --config is given.

    Expected errors end in one paragraph on standard error. The exit code is 2 if starting again
    does not help: for a wrong command line, a TaskFileError, the errors in ``lasting`` and those
    that ``endings`` says, such as a folder that may not be written. It is 1 for a CheckpointError,
    a full disk and the errors in ``expected``. Any other exception is a bug and keeps its
    traceback.
    """

    switched_off: list[str] = []

    def guarded(_: Sequence[str]) -> int:
        # Back to where whoever records the command, or passes it on, looks for it.
        sys.argv += switched_off
        # What was imported stays to the end. The collector need not look at it again, neither while
        # the program runs nor when it exits.
        gc.freeze()
        hear_interrupts()
        keep_ours()
        use_compilation_cache()
        try:
            main(flags.FLAGS.config, WORKDIR.value)
        except (TaskFileError, *lasting) as error:
            return _give_up(str(error), 2)
        except (CheckpointError, *expected) as error:
            return _give_up(str(error), 1)
        except Stopped as error:
            return _complain(
                f"{error}; the same command continues from the last checkpoint", INTERRUPTED
            )
        except KeyboardInterrupt:
            return _complain(
                "stopped; the same command goes on from what is on the disk", INTERRUPTED
            )
        except Exception as error:
            if (told := endings.ending(error)) is None:
                raise
            return _give_up(*told)
        return 0

    sys.argv = [
        f"{flag}={config_file(value)}" if re.fullmatch("--?config", flag) and value else word
        for word in sys.argv
        for flag, _, value in [word.partition("=")]
    ]
    if kind is not None:
        # The library reads overrides from sys.argv, and cannot read these.
        switched_off = [argument for argument in sys.argv if _OFF.fullmatch(argument)]
        sys.argv = [argument for argument in sys.argv if argument not in switched_off]
        off = [argument.partition("config.")[2].partition("=")[0] for argument in switched_off]
        flag = flags.FLAGS["config"]
        flag.parser = _Complete(flag.parser, kind, off)
    trusted.take(sys.argv)
    if asks_for_help(sys.argv[1:]):
        usage.show(console(), kind)
        sys.exit(0)
    if runs:
        _take_run()
    app.run(guarded, flags_parser=lambda argv: _parse(argv, needs_workdir))


def run_folder() -> str | None:
    """The workdir of a run that was given without a flag."""
    return _run_folder


def _take_run() -> None:
    """Takes the first argument for the workdir of a run, and that run's config for --config."""
    global _run_folder
    given = any(re.match("--?config(=|$)", argument) for argument in sys.argv)
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        if not given:
            _refuse("name the workdir of a run first, for instance runs/first")
        return
    _run_folder = sys.argv.pop(1)
    path = Path(_run_folder) / CONFIG_FILE
    if not path.is_file():
        _refuse(f"{_run_folder} holds no run: it has no {CONFIG_FILE}")
    if not given:
        sys.argv.insert(1, f"--config={path}")


def overrides() -> list[str]:
    """The command line's overrides of the config, for another command. Raises ConfigError for one
    whose value is an argument of its own.
    """
    found = [argument for argument in sys.argv[1:] if re.match(r"--?config\.", argument)]
    if apart := [argument for argument in found if "=" not in argument]:
        raise ConfigError(f"{apart[0]} is passed on to other commands: write {apart[0]}=<value>")
    return found


def given(but: Collection[str] = ()) -> list[str]:
    """--config and its overrides as they were given, a word each, for a command that is shown.

    but: dotted keys whose overrides are left out.
    """
    words = sys.argv[1:]
    found = []
    for at, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or (name != "config" and not name.startswith("config.")):
            continue
        if not equals and at + 1 < len(words) and not words[at + 1].startswith("-"):
            equals, value = "=", words[at + 1]
        if name.removeprefix("config.") not in but:
            found.append(f"--{name}{equals}{value}")
    return found


def written() -> set[str]:
    """Dotted keys that the config's file or the command line set, of a command with a ``kind``."""
    flag = flags.FLAGS["config"]
    return flag.parser.written | set(flag.override_values)


def dotted(config: Any, path: str = "") -> Iterator[str]:
    """Dotted keys of a config, with the elements of tuples of sections numbered."""
    if isinstance(config, Mapping | ml_collections.ConfigDict):
        for key in config:
            yield from dotted(config.get(key), f"{path}.{key}" if path else key)
    elif isinstance(config, tuple | list) and isinstance(
        next(iter(config), None), Mapping | ml_collections.ConfigDict
    ):
        for at, section in enumerate(config):
            yield from dotted(section, f"{path}[{at}]")
    else:
        yield path


def use_compilation_cache() -> None:
    """Keeps compiled programs where --compilation_cache says.

    A program compiled for a processor may not run on an older one, and repositories are shared
    between machines, so each kind of processor has a folder of its own.
    """
    folder = COMPILATION_CACHE.value
    if folder is None:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:
        folder = str(Path(__file__).resolve().parents[1] / ".jax_cache" / _processor())
    jax.config.update("jax_compilation_cache_dir", folder or None)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


def _processor() -> str:
    """A name for this machine's kind of processor."""
    words = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
    return f"{platform.machine()}-{zlib.crc32(words.encode()):08x}"


def use_virtual_devices(*meshes: MeshConfig) -> None:
    """Lets the CPU stand for as many devices as the meshes have together, unless XLA_FLAGS already
    says how many.

    Must come before anything uses a device; changes nothing where there is an accelerator.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices_of(meshes))


def sweep_of(config_file: str) -> tuple[list[Mapping[str, Any]], Any]:
    """The overrides of the runs of a config file's sweep, and the panels of its figure.

    config_file: <file>[:<argument>]. Raises ConfigError where the file has no sweep, and for a
    mistake in it.
    """
    from sweeps import runs

    file, _, argument = config_file.partition(":")
    with endings.running_config_file(file):
        return runs.read(file, argument)


def devices_of(meshes: Iterable[MeshConfig]) -> int:
    """Number of devices that meshes need together, where a size that is not said is 1."""
    return sum(mesh.devices for mesh in meshes)


def _parse(argv: Sequence[str], needs_workdir: bool | Callable[[], bool]) -> list[str]:
    _refuse_missing_file(argv)
    try:
        rest = flags.FLAGS(argv)
        check_numbers()
        if flags.FLAGS.config is None:
            _refuse("--config=<file> is missing, for instance --config=configs/quickstart.py")
        flags.FLAGS.config.keys()  # a file that could not be found says so on its first use
    except (flags.Error, OSError, ValueError) as error:
        last = str(error).strip().splitlines()[-1]
        # raised inside the config file, and quoted with its traceback
        if "Traceback" in str(error):
            if last.startswith("ValueError: "):
                _refuse(last.removeprefix("ValueError: "))
            places = re.findall(r'File "(.+)", line (\d+)', str(error))
            files = {str(Path(file).resolve()) for file in _config_files()}
            ours = [place for place in places if str(Path(place[0]).resolve()) in files]
            if not ours:
                raise  # a bug of ours
            _refuse(f"{ours[-1][0]}, line {ours[-1][1]}: {last}")
        # a key that is None has no type to read the text with: in the file it wants a
        # placeholder(type)
        _refuse(str(error).split(" Currently supported")[0])
    except (AttributeError, KeyError) as error:
        if "ml_collections" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            _refuse_mistake(error)
        words = str(error).replace("\\n", ". ").replace("\\'", "").strip("\"'")
        if (name := words.partition(".")[0]) in read_config.RENAMED:
            words = f"{name}. It is called {read_config.RENAMED[name]!r} now"
        _refuse(f"No such key: {words}")
    except Exception as error:
        _refuse_mistake(error)
    needed = needs_workdir() if callable(needs_workdir) else needs_workdir
    if needed and not WORKDIR.value:
        _refuse("--workdir=<folder> is missing, for instance --workdir=runs/first")
    if needed and "://" not in WORKDIR.value and (why := endings.refuse_workdir(WORKDIR.value)):
        _refuse(why)
    if WORKDIR.value and "://" in WORKDIR.value:
        _refuse(
            f"--workdir={WORKDIR.value} is an object store, which has no locks and no hard links; "
            "name a folder that this machine has mounted"
        )
    if rest[1:]:
        _refuse(f"{' '.join(rest[1:])!r} is not a flag; flags look like --config.steps=10")
    return rest


def _refuse_mistake(error: Exception) -> NoReturn:
    """Refuses a mistake in the config file. Raises the error again if it comes from elsewhere: that
    is a bug of ours.
    """
    if (words := endings.in_config_file(error, _config_files())) is None:
        raise error
    _refuse(words)


def _config_files() -> list[str]:
    """The files that --config names."""
    values = [word.partition("=")[2] for word in sys.argv if re.match("--?config=", word)]
    return [value.partition(":")[0] for value in values]


def _refuse_missing_file(argv: Sequence[str]) -> None:
    """Says so when the config file does not exist; the library's own words take three lines."""
    for flag, _, value in (argument.partition("=") for argument in argv):
        path = Path(value.partition(":")[0])
        if flag.lstrip("-") == "config" and value and not path.is_file():
            near = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
            names = ", ".join(str(file) for file in near if file.name != "__init__.py")
            _refuse(f"there is no file {path}" + (f"; {path.parent} has {names}" if names else ""))


def _refuse(text: str) -> NoReturn:
    given = " ".join(argument for argument in sys.argv[1:] if argument.startswith("--config"))
    sys.exit(_complain(f"{' '.join(text.split())} (given: {given or 'no --config'})", 2))


def _give_up(text: str, code: int) -> int:
    """Says why the program gives up, and makes sure that the process ends, even if its other
    threads wait for a disk or another host.
    """
    timer = threading.Timer(_LAST_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return _complain(text, code)


def _complain(text: str, code: int) -> int:
    words, command, rest = text.partition(COMMAND)
    print(
        textwrap.fill(words, 110, break_long_words=False, break_on_hyphens=False), file=sys.stderr
    )
    if command:  # on a line of its own, so that it can be copied
        print(f"{command}{rest}".strip("\n"), file=sys.stderr)
    return code
