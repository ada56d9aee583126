"""From groups of trajectories to fixed shapes: each prompt once, its completions behind it (layout: types.Batch).

A completion's slots end before its last sampled token, which nothing after it is predicted from. Trajectories that end
in a fault, and those in which nothing was sampled, take no slots and no targets: their weight is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from pallas_kernels.tokens import Tokens
from rl_code.types import Batch, Group, Trajectory


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """Shapes of a batch, and how old its tokens may be.

    rows: of a batch, filled from the first on; the update skips micro-batches of empty rows, so room for the worst case
    costs nothing. slots: tokens of a row. targets: sampled tokens of a row. max_staleness: learner's version minus
    sampler's. drop_uninformative: leaves out groups whose advantages are all 0, which have no policy gradient, as DAPO
    (2503.14476) does; neither metrics nor the averages of the loss then count them.
    """

    rows: int
    slots: int
    targets: int
    max_staleness: int
    drop_uninformative: bool

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1")
        if self.slots < 2 or not 1 <= self.targets:
            raise ValueError(f"slots={self.slots} must be at least 2 and targets={self.targets} at least 1")


@dataclasses.dataclass(frozen=True)
class _Completion:
    """A trajectory's part after the prompt, as it goes into a row; sequence: its number in the batch."""

    trajectory: Trajectory
    sequence: int
    advantage: float
    indices: np.ndarray  # of the sampled tokens in the trajectory

    @property
    def slots(self) -> int:
        return int(self.indices[-1]) - self.trajectory.prompt_length


@dataclasses.dataclass
class _Piece:
    """A prompt and the completions that stand behind it in one row."""

    prompt: np.ndarray
    completions: list[_Completion]

    @property
    def slots(self) -> int:
        return len(self.prompt) + sum(completion.slots for completion in self.completions)

    @property
    def targets(self) -> int:
        return sum(len(completion.indices) for completion in self.completions)


def pack(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], config: PackConfig, *, version: int
) -> tuple[Batch, dict[str, float]]:
    """Packs groups into a Batch of numpy arrays, whole groups into rows by first fit, largest first.

    A group that no row can hold is split into pieces that each repeat the prompt. advantages: one [G] per group, or
    [P, G]. version: the learner's. Trajectories are numbered (``Batch.sequences``) in the order given.

    Returns the batch and metrics: pack/rows (used), pack/fill and pack/target_fill (used share of their slots and
    targets), pack/saved (share of tokens that sharing prompts saved), pack/faults, pack/empty and
    pack/uninformative (trajectories left out).

    Raises:
      ValueError: a trajectory fits no row, the batch does not fit ``rows``, lengths or prompts within a group
        disagree, a log-probability or an advantage is not finite, or a token is older than max_staleness or newer
        than ``version``. Each names task, index and numbers.
    """
    if len(advantages) != len(groups):
        raise ValueError(f"{len(groups)} groups but advantages for {len(advantages)}")
    pieces, counts, sequence = [], {"pack/faults": 0, "pack/empty": 0, "pack/uninformative": 0}, 0
    for group, values in zip(groups, advantages, strict=True):
        size, completions = len(group.trajectories), []
        if len(values) != size:
            raise ValueError(f"task {group.task.id!r}: {size} trajectories but {len(values)} advantages")
        if config.drop_uninformative and not np.any(values):
            counts["pack/uninformative"] += size
            sequence += size
            continue
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            indices = np.flatnonzero(trajectory.sampled)
            if trajectory.status == "fault":
                counts["pack/faults"] += 1
            elif indices.size == 0:
                counts["pack/empty"] += 1
            else:
                completion = _Completion(trajectory, sequence, float(advantage), indices)
                completions.append(completion)
                _check(completion, completions[0].trajectory, config, version)
            sequence += 1
        pieces += _pieces(completions, config)
    rows = _first_fit(pieces, config)
    used, targets = sum(piece.slots for piece in pieces), sum(piece.targets for piece in pieces)
    if len(rows) > config.rows:
        raise ValueError(
            f"the batch needs {len(rows)} rows ({used} slots, {targets} targets in {len(pieces)} pieces); "
            f"rows={config.rows} of slots={config.slots} and targets={config.targets}"
        )
    batch = empty_batch(config, config.rows, sequence)
    for row, members in enumerate(rows):
        _fill_row(batch, row, members, version)
    unshared = sum(len(piece.prompt) * len(piece.completions) - len(piece.prompt) for piece in pieces) + used
    metrics = {
        "pack/fill": used / max(len(rows) * config.slots, 1),
        "pack/target_fill": targets / max(len(rows) * config.targets, 1),
        "pack/rows": float(len(rows)),
        "pack/saved": 1.0 - used / unshared if unshared else 0.0,
    }
    return batch, metrics | {name: float(count) for name, count in counts.items()}


def empty_batch(config: PackConfig, rows: int, num_sequences: int = 0) -> Batch:
    """A batch of padding alone: numpy arrays of the shapes and dtypes that ``pack`` returns, for warm-up and tests."""

    def slots() -> np.ndarray:
        return np.zeros((rows, config.slots), np.int32)

    def targets(fill: float, dtype: type) -> np.ndarray:
        return np.full((rows, config.targets), fill, dtype)

    return Batch(
        tokens=slots(),
        positions=slots(),
        segments=slots(),
        branches=slots(),
        sources=targets(0, np.int32),
        targets=targets(0, np.int32),
        logprobs=targets(0, np.float32),
        advantages=targets(0, np.float32),
        mask=targets(0, np.float32),
        sequences=targets(num_sequences, np.int32),
        lengths=targets(1, np.float32),
        staleness=targets(0, np.int32),
    )


def _check(completion: _Completion, first: Trajectory, config: PackConfig, version: int) -> None:
    """Raises ValueError for a trajectory that must not be trained on; ``first`` is its group's first to train on."""
    t, indices = completion.trajectory, completion.indices
    name = f"task {t.task_id!r} trajectory {t.index}"
    lengths = {field: len(getattr(t, field)) for field in ("tokens", "sampled", "logprobs", "versions")}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{name}: lengths differ: {lengths}")
    if not 1 <= t.prompt_length <= indices[0]:
        raise ValueError(f"{name}: prompt_length={t.prompt_length}, but the first sampled token is at {indices[0]}")
    shared = slice(0, t.prompt_length)
    if t.prompt_length != first.prompt_length or not np.array_equal(t.tokens[shared], first.tokens[shared]):
        raise ValueError(f"{name}: its prompt of {t.prompt_length} tokens is not that of its group")
    if not np.isfinite(t.logprobs[indices]).all() or not np.isfinite(completion.advantage):
        raise ValueError(f"{name}: a log-probability or the advantage ({completion.advantage}) is not finite")
    ages = version - t.versions[indices]
    if ages.min() < 0 or ages.max() > config.max_staleness:
        raise ValueError(
            f"{name}: tokens are {ages.min()} to {ages.max()} versions old at version {version}; "
            f"allowed is 0 to {config.max_staleness}"
        )
    slots = t.prompt_length + completion.slots
    if slots > config.slots or len(indices) > config.targets:
        raise ValueError(
            f"{name} needs {slots} slots and {len(indices)} targets; a row has slots={config.slots} "
            f"and targets={config.targets}"
        )


def _pieces(completions: list[_Completion], config: PackConfig) -> list[_Piece]:
    """One group as few pieces that each fit a row; each completion fits a row with its prompt."""
    pieces: list[_Piece] = []
    for completion in completions:
        t = completion.trajectory
        last = pieces[-1] if pieces else None
        if (
            last is None
            or last.slots + completion.slots > config.slots
            or last.targets + len(completion.indices) > config.targets
        ):
            last = _Piece(t.tokens[: t.prompt_length], [])
            pieces.append(last)
        last.completions.append(completion)
    return pieces


def _first_fit(pieces: list[_Piece], config: PackConfig) -> list[list[_Piece]]:
    """Pieces by row: first fit, largest first, equals in the order given."""
    rows: list[list[_Piece]] = []
    free: list[list[int]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.slots):
        fitting = (i for i, (slots, targets) in enumerate(free) if piece.slots <= slots and piece.targets <= targets)
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            free.append([config.slots, config.targets])
        rows[row].append(piece)
        free[row][0] -= piece.slots
        free[row][1] -= piece.targets
    return rows


def _fill_row(batch: Batch, row: int, pieces: list[_Piece], version: int) -> None:
    """Writes one row of the batch in place."""
    slot = target = 0
    for segment, piece in enumerate(pieces, start=1):
        prompt_slot, prompt_length = slot, len(piece.prompt)
        _fill_slots(batch, row, slot, piece.prompt, 0, segment, 0)
        slot += prompt_length
        for branch, completion in enumerate(piece.completions, start=1):
            t, indices = completion.trajectory, completion.indices
            tokens = t.tokens[prompt_length : indices[-1]]
            _fill_slots(batch, row, slot, tokens, prompt_length, segment, branch)
            span = (row, slice(target, target + len(indices)))
            before = indices - 1  # index in the trajectory of the token each target is predicted from
            batch.sources[span] = np.where(before < prompt_length, prompt_slot, slot - prompt_length) + before
            batch.targets[span] = t.tokens[indices]
            batch.logprobs[span] = t.logprobs[indices]
            batch.advantages[span] = completion.advantage
            batch.mask[span] = 1.0
            batch.sequences[span] = completion.sequence
            batch.lengths[span] = len(indices)
            batch.staleness[span] = version - t.versions[indices]
            slot += len(tokens)
            target += len(indices)


def _fill_slots(batch: Batch, row: int, slot: int, tokens: np.ndarray, position: int, segment: int, branch: int):
    span = (row, slice(slot, slot + len(tokens)))
    batch.tokens[span] = tokens
    batch.positions[span] = np.arange(position, position + len(tokens))
    batch.segments[span] = segment
    batch.branches[span] = branch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
    """Rows to imitate, [R, S]: tokens, positions (by which RoPE rotates) int32; mask float32, 1 = learn it.

    where: who sees whom.
    """

    tokens: jax.Array
    positions: jax.Array
    where: Tokens
    mask: jax.Array


def pack_supervised(
    examples: Iterable[tuple[Sequence[int], Sequence[bool]]], *, rows: int, slots: int
) -> tuple[SupervisedBatch, int]:
    """Packs (tokens, mask) pairs in order by first fit into [rows, slots] until one does not fit.

    Returns numpy arrays and how many examples were taken.

    Raises:
      ValueError: an example has more tokens than a row has slots, or a mask of another length.
    """
    ids, positions, marks, zeros = (np.zeros((rows, slots), np.int32) for _ in range(4))
    where = Tokens(segments=marks, branches=zeros, documents=zeros, order=positions)
    batch = SupervisedBatch(ids, positions, where, np.zeros((rows, slots), np.float32))
    used, segments, taken = [0] * rows, [0] * rows, 0
    for tokens, mask in examples:
        if not len(tokens) == len(mask) <= slots:
            raise ValueError(f"example {taken}: {len(tokens)} tokens and a mask of {len(mask)} for {slots=}")
        row = next((row for row in range(rows) if used[row] + len(tokens) <= slots), None)
        if row is None:
            break
        segments[row] += 1
        span = (row, slice(used[row], used[row] + len(tokens)))
        batch.tokens[span], batch.positions[span] = tokens, np.arange(len(tokens))
        marks[span], batch.mask[span] = segments[row], mask
        used[row] += len(tokens)
        taken += 1
    return batch, taken
