"""End of a command when something goes wrong: the exit code, and the line that tells it.

Exit code 2 says that starting again does not help before something is changed. Supervisors and
clusters then leave the command alone; with 1 they start it again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

from absl import flags

from rl_code.config.read_config import ConfigError

# A path that cannot be used as it is, by the number of the system's error, and what would be right.
_PATHS = {
    errno.EACCES: "this user may not; name a place that they may use, or change its owner or mode",
    errno.EPERM: "this user may not; name a place that they may use, or change its owner or mode",
    errno.EROFS: "the file system is read-only; name a folder on another one",
    errno.ENOTDIR: "a part of the path is a file; name a path below folders alone",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "it is there already, and is no folder; name another place",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "symbolic links lead round in a circle; mend them",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of jax, by name: this module does not import it.
_OF_JAX = ("JaxRuntimeError", "XlaRuntimeError")
_MEMORY = (
    "the memory of a device is exceeded. Less is needed with fewer rows at a time "
    "(train.micro_batches higher, rollout.engine.slots lower), shorter episodes (limits.tokens), "
    "fewer pages (rollout.engine.pages_mb), model.remat=True, weights cut over devices "
    "(mesh.fsdp, mesh.tensor) or moments in the host's memory (train.optimizer.offload). "
    "python -m launch.train --dry_run prints what a config takes, and python -m launch.plan the "
    "meshes that fit"
)
_HOST_MEMORY = (
    "the memory of this machine is exceeded. Less is needed with fewer rows at a time "
    "(train.micro_batches higher, rollout.engine.slots lower), shorter episodes (limits.tokens) "
    "and fewer workers (rollout.workers)"
)


def ending(error: BaseException) -> tuple[str, int] | None:
    """(what to say, exit code) for an error that its words explain, whichever command it ends.

    None for any other error: that is a bug, and keeps its traceback.
    """
    if isinstance(error, ConfigError | flags.Error):
        return str(error), 2
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, MemoryError):
        return _HOST_MEMORY, 1
    words = str(error)
    if type(error).__name__ in _OF_JAX and "RESOURCE_EXHAUSTED" in words:
        asked = re.search(r"allocat\w* ([\d.]+ ?[KMGT]?i?B|\d+ bytes)", words)
        return _MEMORY + (f" (it asked for {asked[1]})" if asked else ""), 2
    frames = traceback.extract_tb(error.__traceback__)
    asked_for = os.environ.get("JAX_PLATFORMS")
    # jax has an assertion where no backend of these comes up
    if asked_for and frames and frames[-1].filename.endswith("xla_bridge.py"):
        reason = f": {words.splitlines()[0]}" if words else ""
        return (
            f"JAX_PLATFORMS={asked_for}: jax finds no such device here{reason}; unset it, or name "
            "what this machine and its packages have, such as cpu",
            2,
        )
    return None


def _of_system(error: OSError) -> tuple[str, int] | None:
    """As ``ending``, for an error that the system has told."""
    name = error.filename2 or error.filename
    if error.errno in _FULL:
        where = f"{name}: " if name else ""
        return f"{where}{error.strerror}; make room, and give the same command again", 1
    if name is None:
        return None
    if error.errno in _PATHS:
        return f"{name}: {error.strerror}: {_PATHS[error.errno]}", 2
    if error.errno == errno.ENOENT and is_given(str(name), sys.argv[1:]):
        return f"{name}: no such file or folder; name one that this machine has", 2
    return None


def is_given(name: str, arguments: Sequence[str]) -> bool:
    """True if a path, or a folder that it lies in, is named by the command line."""
    values = [word.partition("=")[2] if word.startswith("-") else word for word in arguments]
    return any(
        name == value or name.startswith(f"{value.rstrip('/')}/") for value in values if value
    )


def in_config_file(error: Exception, files: Iterable[str]) -> str | None:
    """Error inside of one of these config files, with the file and the line that it is at; None
    for one from elsewhere.
    """
    known = {str(Path(file).resolve()) for file in files}
    if isinstance(error, SyntaxError) and str(Path(error.filename or "").resolve()) in known:
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if str(Path(frame.filename).resolve()) in known]
    if not ours:
        return None
    return f"{ours[-1].filename}, line {ours[-1].lineno}: {type(error).__name__}: {error}"


@contextlib.contextmanager
def running_config_file(file: str) -> Generator[None]:
    """Runs code of a config file: raises ConfigError for what goes wrong inside of it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if (words := in_config_file(error, [file])) is None:
            raise  # a bug of ours
        raise ConfigError(words) from error


def refuse_workdir(workdir: str) -> str | None:
    """Reason why nothing can be written into a workdir, in words; None if it can."""
    at = os.path.abspath(workdir)
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    if not os.path.isdir(at):
        return f"--workdir={workdir}: {at} is a file; name a folder"
    if not os.access(at, os.W_OK | os.X_OK):
        return (
            f"--workdir={workdir}: this user cannot write into {at}; name a folder that can be "
            "written, on a file system that is not read-only"
        )
    return None
