"""Checkpoints of a run: Orbax writes the arrays in the background, a record of ours commits them.

Orbax's CheckpointManager names the folders, writes on all hosts, and deletes what is not kept. The
record (``checkpoint_record``) is written after the arrays, and a checkpoint counts only from then
on. Older checkpoints are deleted only when newer ones have their record, so a process that is
killed at any moment leaves a usable one. A checkpoint whose files or arrays do not match its record
is set aside with a warning, and the one before it is used.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from absl import logging

from attention.methods.api import METHODS
from attention.methods.method import LayerShape
from rl_code.checkpoint import arrays
from rl_code.checkpoint import record as checkpoint_record
from rl_code.checkpoint.checksums import finish_checksums, start_checksums
from rl_code.checkpoint.record import CheckpointError, ReadersLost, Record, folder_of
from rl_code.config import read_config
from rl_code.host import files

# What Orbax, TensorStore and json raise when files cannot be written or read; JaxRuntimeError is a
# RuntimeError.
_STORAGE_ERRORS = (OSError, ValueError, KeyError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read."""

    # the number it was saved under
    step: int
    # the pytree
    state: Any
    # the JSON dict that it was saved with
    position: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. One process at a time may hold them; of a run on several hosts,
    every host holds them.

    Args:
      workdir: the run's folder; checkpoints go into ``<workdir>/checkpoints``.
      config: the run's config, a dataclass or nested mapping; it is stored in every record.
      keep: how many of the newest checkpoints stay on disk, at least 1; one more while the next is
        written, and the best. With 2 or more a damaged newest one can be survived.
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
        self._first = jax.process_index() == 0
        self._lock = checkpoint_record.lock(self._folder / "lock") if self._first else None
        try:
            checkpoint_record.check_config(self._folder, config, may_change)
        except read_config.ConfigError:
            self._unlock()
            raise
        if self._first:
            checkpoint_record.remove_incomplete(self._folder)
        self._manager = self._open()
        self._committer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            step_prefix="step",
            step_format_fixed_length=8,
            create=False,
            cleanup_tmp_directories=True,
            preservation_policy=checkpoint_record.KeepCommitted(self._folder, self._keep),
            save_root_metadata=False,
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """Steps that have a commit record, oldest first."""
        return steps(self._folder.parent)

    def save(
        self, step: int, state: Any, position: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Starts saving and returns once the arrays may be donated; the files are written in the
        background.

        Args:
          step: later than every step on disk. A step that this object saved or restored is not
            written again.
          state: a pytree of jax arrays; typed random keys are allowed.
          position: counters and the position in the data, anything JSON can hold.
          score: how good the state is; the best checkpoint is kept beside the newest.

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
        record = Record(
            step=step,
            config=self._config,
            # A copy: the record is written later, and must say what is true now.
            position=json.loads(json.dumps(dict(position))),
            arrays=arrays.describe(state),
            checksums={},
            score=score,
            files={},
        )
        # The checksums are started before the caller may donate the arrays.
        sums = start_checksums(content)
        with self._explain(step):
            self._manager.save(step, args=ocp.args.PyTreeSave(content), force=True)
        self._pending = step, self._committer.submit(self._commit, record, sums)

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
            if broken and self._first:
                for number in broken:
                    checkpoint_record.set_aside(folder_of(self._folder, number))
            self._manager.reload()
        return restored

    def close(self) -> None:
        """Waits for the save in flight and lets the workdir go."""
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            self._manager.close()
            if self._first:
                for number in checkpoint_record.surplus(self._folder, self._keep):
                    checkpoint_record.remove(folder_of(self._folder, number))
            self._unlock()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _commit(self, record: Record, sums: Mapping[str, jax.Array]) -> None:
        """Waits in the background until Orbax has given the arrays their final name, on all hosts,
        then writes the record.
        """
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if self._first:
            record = dataclasses.replace(record, checksums=finish_checksums(sums))
            checkpoint_record.write(folder_of(self._folder, record.step), record)

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
            free = files.free_mib(self._folder) or 0.0
            # The manager remembers what it could not write, so a new one takes its place.
            with contextlib.suppress(*_STORAGE_ERRORS):
                self._manager.close()
            if self._first:
                checkpoint_record.remove_incomplete(self._folder)
            self._manager = self._open()
            raise CheckpointError(
                f"could not write the checkpoint of step {step} to {self._folder} "
                f"({free:.0f} MiB free): "
                f"{_reason(error)}; {remains}"
            ) from error


def steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Steps of a workdir that have a commit record, oldest first."""
    return checkpoint_record.steps(Path(workdir) / "checkpoints")


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


def record_of(
    workdir: str | os.PathLike[str], step: int | Literal["newest", "best"] | None = None
) -> Record:
    """The record of one of a run's checkpoints, which names its arrays; it reads no array.

    Arguments and errors as for ``load_parameters``.
    """
    folder = Path(workdir) / "checkpoints"
    readable: dict[int, Record] = {}
    for number in steps(workdir):
        with contextlib.suppress(CheckpointError):  # ``load`` says what is damaged
            readable[number] = checkpoint_record.read(folder_of(folder, number))
    if not readable:
        raise CheckpointError(f"{workdir} has no checkpoint that can be read (looked in {folder})")
    number = None if step == "newest" else step
    if step == "best":
        number = checkpoint_record.best(list(readable.values()))
        if number is None:
            raise CheckpointError(
                f"no checkpoint in {folder} has a score; set checkpoint.best to a metric"
            )
    if number is not None and number not in readable:
        raise CheckpointError(
            f"no checkpoint of step={number} in {folder}; there are {steps(workdir)}"
        )
    return readable[max(readable) if number is None else number]


def load_parameters(
    workdir: str | os.PathLike[str],
    step: int | Literal["newest", "best"] | None = None,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Parameters:
    """Reads the model of one of a run's checkpoints; needs no config.

    Works while the run is writing. The warm start's checkpoints are in the workdir's folder
    ``sft``, which is a workdir here.

    Args:
      step: of the checkpoint; None or "newest" for the newest that can be read, "best" for the one
        with the highest score.
      shardings: where each parameter goes, by name; the default device for those not named.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    record = record_of(workdir, step)
    parameters = {
        name.removeprefix("model."): words
        for name, words in record.arrays.items()
        if name.startswith("model.")
    }
    abstract = {
        name: arrays.from_words(words, (shardings or {}).get(name))
        for name, words in parameters.items()
    }
    # of the newest, an older one is read if it turns out to be damaged
    number = None if step in (None, "newest") else record.step
    restored = load(workdir, {"model": abstract}, step=number, partial=True)
    return Parameters(restored.step, record.config, restored.state["model"])


def _restore_newest(
    folder: Path, abstract: Any, step: int | None, partial: bool
) -> tuple[Restored | None, list[int]]:
    """The checkpoint and the numbers of the newer ones that turned out to be damaged."""
    found = steps(folder.parent)
    if step is not None and step not in found:
        raise CheckpointError(f"no checkpoint of {step=} in {folder}; there are {found}")
    broken: dict[int, str] = {}
    for number in [step] if step is not None else reversed(found):
        directory = folder_of(folder, number)
        try:
            record = checkpoint_record.read(directory)
            checkpoint_record.check_files(directory, record)
            state = _read(directory, record, abstract, partial)
        except ReadersLost:
            raise
        except CheckpointError as error:
            broken[number] = str(error)
            continue
        for bad, reason in broken.items():
            logging.warning(
                "checkpoint of step %d is damaged (%s); using step %d", bad, reason, number
            )
        return Restored(number, state, record.position), list(broken)
    if broken:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read: "
            + "; ".join(f"step {number}: {reason}" for number, reason in broken.items())
            + ". Delete the folder to start from the beginning."
        )
    return None, []


def _methods_of(names: Collection[str]) -> str:
    """Hint at the methods of attention with parameters of these dotted names; "" for none."""
    parts = {part for name in names for part in name.split(".")}
    one = LayerShape(1, 1, 1, 1)
    owners = [name for name, kind in METHODS.items() if parts & kind().parameters(one).keys()]
    return f"; layers have it where model.attention is {' or '.join(owners)}" if owners else ""


def _read(directory: Path, record: Record, abstract: Any, partial: bool) -> Any:
    """The checked arrays of a checkpoint, in the structure, shapes, dtypes and shardings of
    ``abstract``.
    """
    wanted = arrays.describe(abstract)
    stored = record.arrays
    for name, here in wanted.items():
        if stored.get(name) != here:
            raise read_config.ConfigError(
                f"{name}: expected {here}, found {stored.get(name, 'nothing')} in {directory}"
            )
    extra = sorted(stored.keys() - wanted.keys())
    if extra and not partial:
        raise read_config.ConfigError(
            f"{directory} has {', '.join(extra)}, which the state does not have{_methods_of(extra)}"
        )
    target = arrays.targets(abstract)
    arguments = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=partial,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(directory / checkpoint_record.ARRAYS, args=arguments)
    # Orbax raises a plain Exception around what TensorStore says of a damaged file.
    except Exception as error:
        if jax.process_count() > 1 and "Gloo" in str(error):
            raise ReadersLost(
                f"{directory.name} was not read: the {jax.process_count()} processes that read it "
                f"together did not reach each other ({_reason(error)}). The checkpoint is kept; "
                "start them again"
            ) from error
        raise CheckpointError(f"{directory.name} cannot be read: {_reason(error)}") from error
    checkpoint_record.check_arrays(directory, record, restored)
    return arrays.rebuild(abstract, restored)


def _reason(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return "the disk is full" if os.strerror(errno.ENOSPC) in text else text
