"""Checkpoints: one step's arrays (written by Orbax, asynchronously) and a commit record beside
them.

    checkpoints/step_00000040/       arrays, one Orbax tree
    checkpoints/step_00000040.json   the record: config, position in the data, shapes, size and CRC
    of each file

The record is written last and replaced atomically, older checkpoints are deleted only after it, so
a process that is killed at any moment leaves the older checkpoint usable. A step without a record
never happened. A step whose files do not match its record is set aside with a warning and the one
before it is used.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from rl_code import arrays, files, read_config

_RECORD = re.compile(r"step_(\d{8,})\.json")
# What Orbax and TensorStore raise when files cannot be written or read; JaxRuntimeError is a
# RuntimeError.
_STORAGE_ERRORS = (OSError, ValueError, KeyError, RuntimeError)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what is still
    good.
    """


@dataclasses.dataclass(frozen=True)
class Restored:
    """step: number it was saved under. state: the pytree. position: the JSON dict it was saved
    with.
    """

    step: int
    state: Any
    position: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; one process at a time may hold them (every host of a multi-host
    run holds them).

    Args:
      workdir: the run's folder; checkpoints go into ``<workdir>/checkpoints``.
      config: the run's config, a dataclass or nested mapping; it is stored in every record.
      keep: how many of the newest checkpoints stay on disk, at least 1. With 2 or more a damaged
        newest one can be survived.
      may_change: dotted keys (or whole sections) that may differ between the config here and the
      stored one.

    Raises:
      ConfigError: the workdir holds checkpoints of another config; names the differing keys and
      both values. CheckpointError: another process is using the workdir.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: Any,
        *,
        keep: int,
        may_change: Collection[str] = (),
    ):
        if keep < 1:
            raise ValueError(f"{keep=} must be at least 1")
        self._folder = Path(workdir).absolute() / "checkpoints"
        self._config = read_config.to_dict(config)
        self._keep = keep
        self._known: set[int] = set()
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._folder / "lock") if jax.process_index() == 0 else None
        try:
            _check_config(self._folder, self._config, may_change)
        except read_config.ConfigError:
            self._unlock()
            raise
        _remove_incomplete(self._folder)
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._committer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")

    def steps(self) -> list[int]:
        """Steps that have a commit record, oldest first."""
        return steps(self._folder.parent)

    def save(self, step: int, state: Any, position: Mapping[str, Any]) -> None:
        """Starts saving and returns once the arrays may be donated; the files are written in the
        background.

        Args:
          step: later than every step on disk. A step that this object saved or restored is not
          written again. state: a pytree of jax arrays; typed random keys are allowed. position:
          counters and the position in the data, anything JSON can hold.

        Raises:
          CheckpointError: this save, or the one before it, could not be written.
          TypeError: a leaf is no jax array, or position is not JSON.
          ValueError: the workdir already has this or a later step, which was not restored.
        """
        self.wait()
        if step in self._known:
            return
        if found := [other for other in self.steps() if other >= step]:
            raise ValueError(
                f"{step=} does not come after {found[-1]}, which is already in {self._folder}; "
                "restore it first"
            )
        content = arrays.flatten(state)
        shapes = arrays.describe(state)
        record = {
            "step": step,
            "config": self._config,
            "position": dict(position),
            "arrays": shapes,
        }
        record = json.loads(json.dumps(record))  # what is written later is what is true now
        directory = self._directory(step)
        with self._explain(step):
            self._checkpointer.save(directory, args=ocp.args.PyTreeSave(content))
        self._pending = step, self._committer.submit(self._commit, directory, record)

    def wait(self) -> None:
        """Blocks until the save in flight, if any, is committed. Raises CheckpointError if it
        failed.
        """
        if self._pending is None:
            return
        (step, commit), self._pending = self._pending, None
        with self._explain(step):
            commit.result()
        self._known.add(step)

    def restore(self, abstract: Any, *, partial: bool = False) -> Restored | None:
        """The newest usable checkpoint, or None when there is none yet. Newer damaged ones are set
        aside.

        Args:
          abstract: a pytree like the saved one whose leaves have shape, dtype and sharding (jax
            arrays, or ``jax.ShapeDtypeStruct`` with a sharding; without one the array goes to the
            default device).
          partial: take only the leaves that ``abstract`` has, for instance the model without its
          optimizer.

        Raises:
          CheckpointError: there are checkpoints and none of them can be read.
          ConfigError: a leaf is missing, unexpected, or of another shape or dtype; names it with
          both.
        """
        self.wait()
        restored, broken = _restore_newest(self._folder, abstract, None, partial)
        if restored is not None:
            self._known.add(restored.step)
            for number in broken:
                _set_aside(self._directory(number))
        return restored

    def close(self) -> None:
        """Waits for the save in flight and lets the workdir go."""
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            self._checkpointer.close()
            self._unlock()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _directory(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _commit(self, directory: Path, record: dict[str, Any]) -> None:
        """In the background: waits until Orbax has given the arrays their final name, then writes
        the record.
        """
        self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return
        record["files"] = {name: _checksum(directory / name) for name in _list(directory)}
        for path in (*(directory / name for name in record["files"]), directory):
            files.sync(path)
        files.write_atomically(_record_path(directory), json.dumps(record).encode())
        for old in self.steps()[: -self._keep]:
            _remove(self._directory(old))

    @contextlib.contextmanager
    def _explain(self, step: int) -> Iterator[None]:
        """Turns what storage raises while ``step`` is written into a CheckpointError, and clears
        the remains.
        """
        try:
            yield
        except _STORAGE_ERRORS as error:
            good = [s for s in self.steps() if s != step]
            remains = (
                f"the checkpoint of step {good[-1]} is still good"
                if good
                else "there is no older checkpoint"
            )
            free = shutil.disk_usage(self._folder).free
            _remove_incomplete(self._folder)
            raise CheckpointError(
                f"could not write the checkpoint of step {step} to {self._folder} "
                f"({free / 2**20:.0f} MiB free): "
                f"{_reason(error)}; {remains}"
            ) from error


def steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Steps of a workdir that have a commit record, oldest first."""
    folder = Path(workdir) / "checkpoints"
    found = (_RECORD.fullmatch(path.name) for path in folder.glob("step_*.json"))
    return sorted(int(match.group(1)) for match in found if match)


def load(
    workdir: str | os.PathLike[str],
    abstract: Any,
    *,
    step: int | None = None,
    partial: bool = False,
) -> Restored | None:
    """Reads a checkpoint without owning the workdir, so also while a run is writing to it. As
    Checkpoints.restore.
    """
    return _restore_newest(Path(workdir).absolute() / "checkpoints", abstract, step, partial)[0]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The model of a checkpoint, without the run around it."""

    # the step it was saved under
    step: int
    # the run's config, a nested dict
    config: dict[str, Any]
    # the parameters by name, as ``arrays.flatten`` names those of a model
    arrays: dict[str, jax.Array]


def load_parameters(
    workdir: str | os.PathLike[str],
    step: int | None = None,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Parameters:
    """Reads the model of a run's newest checkpoint, or of the one of ``step``; needs no config.

    Works while the run is writing. The warm start's checkpoints are in the workdir's folder
    ``sft``, which is a workdir here.

    Args:
      shardings: where each parameter goes, by name; the default device for those not named.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    found = steps(workdir)
    if not found:
        raise CheckpointError(f"{workdir} has no checkpoint (looked in {workdir}/checkpoints)")
    if step is not None and step not in found:
        raise CheckpointError(f"no checkpoint of {step=} in {workdir}; there are {found}")
    for number in [step] if step is not None else reversed(found):
        record = _record_path(Path(workdir) / "checkpoints" / f"step_{number:08d}")
        with contextlib.suppress(OSError, ValueError):  # ``load`` says what is damaged
            content = json.loads(record.read_text())
            break
    else:
        raise CheckpointError(f"no record of a checkpoint in {workdir} can be read")
    parameters = {
        name.removeprefix("model."): words
        for name, words in content["arrays"].items()
        if name.startswith("model.")
    }
    abstract = {
        name: arrays.from_words(words, (shardings or {}).get(name))
        for name, words in parameters.items()
    }
    restored = load(workdir, {"model": abstract}, step=step, partial=True)
    return Parameters(restored.step, content["config"], restored.state["model"])


def _restore_newest(
    folder: Path, abstract: Any, step: int | None, partial: bool
) -> tuple[Restored | None, list[int]]:
    """The checkpoint and the numbers of the newer ones that turned out to be damaged."""
    found = steps(folder.parent)
    if step is not None and step not in found:
        raise CheckpointError(f"no checkpoint of {step=} in {folder}; there are {found}")
    broken: dict[int, str] = {}
    for number in [step] if step is not None else reversed(found):
        directory = folder / f"step_{number:08d}"
        try:
            record = _verified_record(directory)
            state = _read(directory, record, abstract, partial)
        except CheckpointError as error:
            broken[number] = str(error)
            continue
        for bad, reason in broken.items():
            logging.warning(
                "checkpoint of step %d is damaged (%s); using step %d", bad, reason, number
            )
        return Restored(number, state, record["position"]), list(broken)
    if broken:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read: "
            + "; ".join(f"step {number}: {reason}" for number, reason in broken.items())
            + ". Delete the folder to start from the beginning."
        )
    return None, []


def _verified_record(directory: Path) -> dict[str, Any]:
    """The commit record of a step whose files all have the size and checksum it states."""
    path = _record_path(directory)
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not readable: {error}") from error
    for name, (size, crc) in record["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{directory.name}/{name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{directory.name}/{name} has {file.stat().st_size} bytes instead of {size}"
            )
        if _checksum(file)[1] != crc:
            raise CheckpointError(f"{directory.name}/{name} has changed since it was written")
    return record


def _read(directory: Path, record: Mapping[str, Any], abstract: Any, partial: bool) -> Any:
    """The arrays of a verified checkpoint, in the structure, shapes, dtypes and shardings of
    ``abstract``.
    """
    wanted = arrays.describe(abstract)
    stored = record["arrays"]
    for name, here in wanted.items():
        if stored.get(name) != here:
            raise read_config.ConfigError(
                f"{name}: expected {here}, found {stored.get(name, 'nothing')} in {directory}"
            )
    extra = sorted(stored.keys() - wanted.keys())
    if extra and not partial:
        raise read_config.ConfigError(
            f"{directory} has {', '.join(extra)}, which the state does not have"
        )
    target = arrays.targets(abstract)
    arguments = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=partial,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return arrays.rebuild(abstract, checkpointer.restore(directory, args=arguments))
    except _STORAGE_ERRORS as error:
        raise CheckpointError(f"{directory.name} cannot be read: {_reason(error)}") from error


def _check_config(folder: Path, config: Mapping[str, Any], may_change: Collection[str]) -> None:
    """Compares with the newest record that can be read."""
    for step in reversed(steps(folder.parent)):
        try:
            stored = json.loads((folder / f"step_{step:08d}.json").read_text())["config"]
        except (OSError, ValueError):
            continue  # a damaged record is reported when it is restored
        read_config.check_same(stored, config, folder.parent, may_change)
        return


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        busy = error.errno in (errno.EACCES, errno.EAGAIN)
        why = (
            "another process is running in"
            if busy
            else "a file system that can lock files is needed for"
        )
        raise CheckpointError(f"{why} {path.parent.parent}: {error.strerror}") from error
    return descriptor


def _record_path(directory: Path) -> Path:
    return directory.with_suffix(".json")


def _list(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def _checksum(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
        return file.tell(), crc


def _remove(directory: Path) -> None:
    """Deletes a checkpoint, its record first, so that no record ever stands without its files."""
    _record_path(directory).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_incomplete(folder: Path) -> None:
    """Deletes what a killed or failed save left: folders without a record, temporary files."""
    if jax.process_index() != 0:
        return
    complete = {f"step_{step:08d}" for step in steps(folder.parent)}
    for path in folder.glob(f".step_*{files.PARTIAL}"):
        path.unlink(missing_ok=True)
    for path in folder.glob("step_*"):
        if path.is_dir() and path.name not in complete:
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(directory: Path) -> None:
    """Renames a damaged checkpoint so that it neither counts nor is lost."""
    if jax.process_index() != 0:
        return
    target = directory.with_name(f"damaged_{directory.name}")
    shutil.rmtree(target, ignore_errors=True)
    if directory.exists():
        directory.rename(target)
    _record_path(directory).replace(_record_path(target))


def _reason(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return "the disk is full" if os.strerror(errno.ENOSPC) in text else text
