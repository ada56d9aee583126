"""From groups of trajectories to fixed shapes: each prompt once, its completions behind it (layout:
types.Batch).

A completion's slots end before its last sampled token, which nothing after it is predicted from.
Trajectories that end in a fault, and those in which nothing was sampled, take no slots and no
targets: their weight is 0.

For two-phase updates prompts stand in rows of their own (``Prompts``), which need no trajectories,
and a row of the Batch holds the completions of the prompts in the same row. There a prompt lacks
its last token, with which each of its completions begins instead, so that all targets are predicted
from the Batch's own slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tokens import Tokens, packed_rows
from rl_code.learner.advantages import Credit
from rl_code.learner.completions import Completion, RowWriter, completions_of
from rl_code.read_config import follows
from rl_code.types import Batch, Group


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """Shapes of a batch, and how old its tokens may be. In a run rows, slots and targets that are
    None follow from the limits of an episode and the size of a group (``rl_code.derive``).

    rows: of a batch, filled from the first on; the update skips micro-batches of empty rows, so
    room for the worst case costs nothing. slots: tokens of a row. targets: sampled tokens of a row.
    max_staleness: learner's version minus sampler's. drop_uninformative: leaves out groups whose
    advantages are all 0, which have no policy gradient, as DAPO (2503.14476) does; neither metrics
    nor the averages of the loss then count them. runs: prompts and completions of a row, at most, 0
    for any number; models whose layers choose blocks need it, see ``update.batch_logprobs``.
    prompt_slots: of two-phase updates, tokens of a row of prompts, beside ``slots`` for the
    completions; 0 where there is one phase. align: prompts and completions start at slots that are
    multiples of it; at 64, a block of attention in XLA, fewer blocks hold parts of two completions,
    for some empty slots between them.
    """

    rows: int | None = None
    slots: int | None = None
    targets: int | None = None
    max_staleness: int = follows("asynchrony.max_staleness", 0)
    drop_uninformative: bool = True
    runs: int = 0
    prompt_slots: int = 0
    align: int = 1

    def __post_init__(self):
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1")
        if self.align < 1:
            raise ValueError(f"align={self.align} must be at least 1")
        if self.runs == 1 or min(self.runs, self.prompt_slots) < 0:
            raise ValueError(
                f"runs={self.runs} must be 0 or at least 2, a prompt and a completion, and "
                "prompt_slots="
                f"{self.prompt_slots} at least 0"
            )
        if (self.slots is not None and self.slots < 2) or (
            self.targets is not None and self.targets < 1
        ):
            raise ValueError(
                f"slots={self.slots} must be at least 2 and targets={self.targets} at least 1"
            )


@dataclasses.dataclass
class _Piece:
    """A prompt and the completions that stand behind it in one row."""

    prompt: np.ndarray
    completions: list[Completion]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(completion.slots for completion in self.completions)

    @property
    def targets(self) -> int:
        return sum(len(completion.indices) for completion in self.completions)

    def needs(self, config: PackConfig) -> np.ndarray:
        """Slots, targets and runs."""
        lengths = [len(self.prompt), *(completion.slots for completion in self.completions)]
        return np.array([_aligned(lengths, config), self.targets, _runs(lengths, config)])


def _aligned(lengths: Sequence[int], config: PackConfig) -> int:
    """Slots that runs of these lengths take."""
    return sum(-(-length // config.align) * config.align for length in lengths)


def _runs(lengths: Sequence[int], config: PackConfig) -> int:
    """Runs that these are, with the empty slots behind them."""
    return sum((length > 0) + (length % config.align > 0) for length in lengths)


def _room(config: PackConfig) -> np.ndarray:
    """Slots, targets and runs of a row."""
    return np.array([config.slots, config.targets, config.runs or np.iinfo(np.int64).max])


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    config: PackConfig,
    *,
    version: int,
) -> tuple[Batch, dict[str, float]]:
    """Packs groups into a Batch of numpy arrays, whole groups into rows by first fit, largest
    first.

    A group that no row can hold is split into pieces that each repeat the prompt. advantages: of
    every group those of its trajectories, one number each or one for each sampled token. version:
    the learner's. Trajectories are numbered
    (``Batch.trajectories``) in the order given.

    Returns the batch and metrics: pack/rows (used), pack/fill and pack/target_fill (used share of
    their slots and targets), pack/saved (share of tokens that sharing prompts saved), pack/faults,
    pack/empty and pack/uninformative (trajectories left out).

    Raises:
      ValueError: a trajectory fits no row, the batch does not fit ``rows``, lengths or prompts
        within a group disagree, a log-probability or an advantage is not finite, or a token is
        older than max_staleness or newer than ``version``. Each names task, index and numbers.
    """
    members, sequence, counts = _members(groups, advantages, config, version)
    pieces = [piece for completions in members for piece in _pieces(completions, config)]
    rows = _first_fit(pieces, config)
    used = sum(piece.tokens for piece in pieces)
    targets = sum(piece.targets for piece in pieces)
    if len(rows) > config.rows:
        raise ValueError(
            f"the batch needs {len(rows)} rows ({used} slots, {targets} targets in {len(pieces)} "
            "pieces); "
            f"rows={config.rows} of slots={config.slots}, targets={config.targets} and "
            f"runs={config.runs}"
        )
    batch = empty_batch(config, config.rows, sequence)
    for row, members in enumerate(rows):
        _fill_row(RowWriter(batch, row, config.align), members, version)
    unshared = (
        sum(len(piece.prompt) * len(piece.completions) - len(piece.prompt) for piece in pieces)
        + used
    )
    metrics = {
        "pack/fill": used / max(len(rows) * config.slots, 1),
        "pack/target_fill": targets / max(len(rows) * config.targets, 1),
        "pack/rows": float(len(rows)),
        "pack/saved": 1.0 - used / unshared if unshared else 0.0,
    }
    return batch, metrics | counts


def empty_batch(config: PackConfig, rows: int, num_trajectories: int = 0) -> Batch:
    """A batch of padding alone: numpy arrays of the shapes and dtypes that ``pack`` returns, for
    warm-up and tests.
    """

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
        trajectories=targets(num_trajectories, np.int32),
        lengths=targets(1, np.float32),
        staleness=targets(0, np.int32),
    )


def _pieces(completions: list[Completion], config: PackConfig) -> list[_Piece]:
    """One group as few pieces that each fit a row. Raises ValueError for a completion that fits
    none.
    """
    pieces: list[_Piece] = []
    for completion in completions:
        t = completion.trajectory
        piece = _Piece(t.tokens[: t.prompt_length], [completion])
        needs = piece.needs(config)
        if np.any(needs > _room(config)):
            raise ValueError(
                f"task {t.task_id!r} trajectory {t.index} needs {needs[0]} slots and {needs[1]} "
                "targets; a row has "
                f"slots={config.slots} and targets={config.targets}"
            )
        longer = _Piece(piece.prompt, [*(pieces[-1].completions if pieces else []), completion])
        if pieces and np.all(longer.needs(config) <= _room(config)):
            pieces[-1] = longer
        else:
            pieces.append(piece)
    return pieces


def _first_fit(pieces: list[_Piece], config: PackConfig) -> list[list[_Piece]]:
    """Pieces by row: first fit, largest first, equals in the order given."""
    rows: list[list[_Piece]] = []
    free: list[np.ndarray] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        needs = piece.needs(config)
        row = next((i for i, room in enumerate(free) if np.all(needs <= room)), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(_room(config))
        rows[row].append(piece)
        free[row] -= needs
    return rows


def _fill_row(writer: RowWriter, pieces: list[_Piece], version: int) -> None:
    """Writes one row of a batch in place."""
    for segment, piece in enumerate(pieces, start=1):
        start = writer.slot
        length = len(piece.prompt)
        writer.write(piece.prompt, 0, segment, 0)
        for branch, completion in enumerate(piece.completions, start=1):
            writer.write_completion(
                completion, segment, branch, version, first=length, prompt_slot=start
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """Rows of prompts for a two-phase update, int32 [R, P]: tokens, positions, segments (0 for
    padding).

    Prompt i of n stands in row i % R as segment 1 + i // R, without its last token.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array

    @property
    def where(self) -> Tokens:
        """Who sees whom."""
        return packed_rows(self.segments, jnp.zeros_like(self.segments), self.positions)


def pack_prompts(prompts: Sequence[Sequence[int]], config: PackConfig) -> Prompts:
    """Lays out the prompts of a step, one per group, before anything is sampled; numpy arrays.

    Raises:
      ValueError: a prompt is empty, or the prompts of a row exceed ``prompt_slots``.
    """
    shape = (config.rows, config.prompt_slots)
    packed = Prompts(*(np.zeros(shape, np.int32) for _ in range(3)))
    used = [0] * config.rows
    for number, prompt in enumerate(prompts):
        row = number % config.rows
        size = len(prompt) - 1
        span = (row, slice(used[row], used[row] + size))
        if size < 0 or span[1].stop > config.prompt_slots:
            raise ValueError(
                f"prompt {number} of {len(prompt)} tokens does not fit row {row}, in which "
                f"{used[row]} of prompt_slots="
                f"{config.prompt_slots} are used"
            )
        packed.tokens[span] = prompt[:-1]
        packed.positions[span] = np.arange(size)
        packed.segments[span] = 1 + number // config.rows
        used[row] += size
    return packed


def pack_completions(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    prompts: Prompts,
    config: PackConfig,
    *,
    version: int,
) -> tuple[Batch, dict[str, float]]:
    """Packs the completions of the prompts that ``pack_prompts`` laid out, group i those of prompt
    i; else as ``pack``.

    Raises:
      ValueError: as ``pack``; a group's prompt is not the one laid out, or a row of completions
      does not fit.
    """
    members, sequence, metrics = _members(groups, advantages, config, version)
    batch = empty_batch(config, config.rows, sequence)
    writers = [RowWriter(batch, row, config.align) for row in range(config.rows)]
    needs = np.zeros((config.rows, 3), int)
    laid_out = np.asarray(prompts.tokens)
    segments = np.asarray(prompts.segments)
    tokens = int(np.sum(segments > 0))
    unshared = 0
    for number, (group, completions) in enumerate(zip(groups, members, strict=True)):
        row = number % config.rows
        segment = 1 + number // config.rows
        prompt = laid_out[row, segments[row] == segment]
        lengths = [completion.slots + 1 for completion in completions]
        targets = sum(len(completion.indices) for completion in completions)
        needs[row] += [_aligned(lengths, config), targets, 1 + _runs(lengths, config)]
        if np.any(needs[row] > _room(config)):
            raise ValueError(
                f"row {row} needs {needs[row, 0]} slots, {needs[row, 1]} targets and "
                f"{needs[row, 2]} runs for task "
                f"{group.task.id!r} and those before; it has slots={config.slots}, "
                f"targets={config.targets} and "
                f"runs={config.runs}"
            )
        for branch, completion in enumerate(completions, start=1):
            t = completion.trajectory
            if t.prompt_length != len(prompt) + 1 or not np.array_equal(
                t.tokens[: len(prompt)], prompt
            ):
                raise ValueError(
                    f"task {t.task_id!r}: its prompt is not prompt {number} of those laid out"
                )
            writers[row].write_completion(completion, segment, branch, version, first=len(prompt))
        tokens = tokens + sum(lengths)
        unshared = unshared + sum(lengths) + len(prompt) * len(lengths)
    filled = int(np.sum(needs[:, 1] > 0))
    return batch, metrics | {
        "pack/fill": tokens / (filled * config.slots + config.rows * config.prompt_slots),
        "pack/target_fill": needs[:, 1].sum() / max(filled * config.targets, 1),
        "pack/rows": float(filled),
        "pack/saved": 1.0 - tokens / unshared if unshared else 0.0,
    }


def _members(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    config: PackConfig,
    version: int,
):
    """``completions_of`` with the limits of the config."""
    limits = dict(drop_uninformative=config.drop_uninformative, max_staleness=config.max_staleness)
    return completions_of(groups, advantages, **limits, version=version)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
    """Rows to imitate, [R, S]: tokens, positions (by which RoPE rotates) int32; mask float32, 1 =
    learn it.

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
    used = [0] * rows
    segments = [0] * rows
    taken = 0
    for tokens, mask in examples:
        if not len(tokens) == len(mask) <= slots:
            raise ValueError(
                f"example {taken}: {len(tokens)} tokens and a mask of {len(mask)} for {slots=}"
            )
        row = next((row for row in range(rows) if used[row] + len(tokens) <= slots), None)
        if row is None:
            break
        segments[row] += 1
        span = (row, slice(used[row], used[row] + len(tokens)))
        batch.tokens[span] = tokens
        batch.positions[span] = np.arange(len(tokens))
        marks[span] = segments[row]
        batch.mask[span] = mask
        used[row] += len(tokens)
        taken += 1
    return batch, taken
