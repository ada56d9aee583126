"""Packs groups of trajectories into a batch of fixed shapes (``batch.Batch``).

A prefix that several contexts share stands in a row once, and what continues it stands behind it.
A context takes no slot for its last sampled token: no later token is predicted from it.
Trajectories that ended in a fault, and those in which nothing was sampled, take no slots and no
targets, so their weight is 0. For updates in two phases see ``two_phase_batching``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np

from pallas_kernels.tokens import Tokens, packed_rows
from rl_code.config.read_config import follows
from rl_code.environment.documents import DocumentsConfig
from rl_code.learner import picks
from rl_code.learner.advantages import Credit
from rl_code.learner.batch import Batch
from rl_code.learner.examples import Example, examples_of
from rl_code.learner.prefix_tree import Piece, RowWriter, share
from rl_code.learner.row_slots import Slots, cut_documents
from rl_code.types import Group


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """Shapes of a batch, and how old its tokens may be.

    In a run, ``rows``, ``slots`` and ``targets`` that are None follow from the limits of an episode
    and the size of a group (``rl_code.run.derive``).
    """

    # Rows of a batch. They are filled from the first on. The update skips micro-batches whose rows
    # are all empty, so room for the worst case costs no time.
    rows: int | None = None
    # Slots of a row: how many tokens it holds.
    slots: int | None = None
    # Targets of a row: how many sampled tokens it holds.
    targets: int | None = None
    # The greatest staleness of a token: the learner's version minus the version that sampled it.
    max_staleness: int = follows("asynchrony.max_staleness", 0)
    # Whether groups whose advantages are all 0 are left out, as in DAPO (2503.14476): they have no
    # policy gradient. Metrics and the averages of the loss do not count them then.
    drop_uninformative: bool = True
    # The most runs of tokens that a row may hold; 0 for any number. A run is a prompt, what one
    # trajectory adds to its prompt, or the empty slots that ``align`` leaves behind either. Models
    # with layers that choose blocks of keys need this bound, see ``logprobs.batch_logprobs``. With
    # documents, ``slots`` then bounds the places that all runs of a row reach over, padding of
    # documents included (``attention.blocks.aligned``). In a run of such a model 0 means a prompt
    # and the trajectories that a row is sized for.
    runs: int = 0
    # For updates in two phases: slots of a row that holds prompts. ``slots`` then counts what
    # follows the prompts. 0 for updates in one phase.
    prompt_slots: int = 0
    # Every run starts at a slot that is a multiple of this number. 64 is the block of attention in
    # XLA: fewer blocks then hold parts of two trajectories, at the price of some empty slots.
    align: int = 1
    # The documents of contexts; None where there are none.
    documents: DocumentsConfig | None = follows("documents", None)
    # Devices over which the slots of a row are cut. Documents then lie on one of them each, where
    # they can (``row_slots``).
    parts: int = follows("mesh.context", 1)
    # True if groups may hold demonstrations.
    demonstrated: bool = follows("train.demonstrations", False)
    # The greatest staleness of tokens that are credited in a later step than their group
    # (``rl_code.rollout.late_credit``).
    late_staleness: int = follows("memory.oldest", 0)
    # Names of the parts of an episode whose tokens are not trained (``learner.parts``).
    untrained: tuple[str, ...] = follows("train.parts", ())

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

    @property
    def levels(self) -> int | None:
        """Depth to which the trees of shared prefixes may be; None for any depth.

        The depth is 2 (a group's prompt, and what follows it) in two cases. Layers that choose
        blocks of keys can copy the last block of the prompt only. The first phase of a two-phase
        update has only prompts. A deeper prefix is then repeated for each context, which gives the
        same result and takes more tokens.
        """
        return 2 if self.runs or self.prompt_slots else None


def needs(piece: Piece, config: PackConfig) -> np.ndarray:
    """int64 [3]: the slots, targets and runs of a row that a piece takes."""
    nodes = piece.nodes
    lengths = [len(node.tokens) for node in nodes]
    slots = _taken(piece, config)
    if config.runs and config.documents is not None:
        slots = [max(taken, node.places) for taken, node in zip(slots, nodes, strict=True)]
    # A node that is not empty is one run. The slots that are left empty behind it, up to the next
    # multiple of ``align``, are another.
    runs = sum((length > 0) + (length % config.align > 0) for length in lengths)
    return np.array([sum(slots), piece.targets, runs])


def _taken(piece: Piece, config: PackConfig) -> np.ndarray:
    """int64 [nodes]: the slots that each node takes, every one from a multiple of ``align`` on."""
    lengths = np.array([len(node.tokens) for node in piece.nodes], int)
    return -(-lengths // config.align) * config.align


def _slots_of(config: PackConfig) -> Slots:
    """The slots of an empty row."""
    spare = 0 if config.documents is None or config.parts == 1 else config.slots
    return Slots(config.align, config.slots // config.parts, spare)


def room(config: PackConfig) -> np.ndarray:
    """int64 [3]: the slots, targets and runs that an empty row has."""
    # Where the number of runs has no bound, the greatest integer stands for it, so that the callers
    # compare three numbers in every case.
    return np.array([config.slots, config.targets, config.runs or np.iinfo(np.int64).max])


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    config: PackConfig,
    *,
    version: int,
    choices: Mapping[str, jax.ShapeDtypeStruct] = MappingProxyType({}),
    late: int = 0,
) -> tuple[Batch, dict[str, float]]:
    """Packs groups into a Batch of numpy arrays.

    Whole groups are put into rows by first fit, the largest first. A group that no row can hold is
    split into pieces, each of which repeats the prompt. Trajectories are numbered
    (``Batch.trajectories``) in the order given.

    Args:
      groups: the groups to train on.
      advantages: for every group the advantages of its trajectories: one number for a trajectory,
        or one for each of its sampled tokens.
      version: the version of the learner's weights.
      choices: what the batch has of ``Batch.choices`` for each target (``picks.shapes``).
      late: how many of the last groups are of earlier steps, and may have ``late_staleness``.

    Returns the batch and its metrics: pack/rows (rows that are used), pack/fill and
    pack/target_fill (the share of their slots and targets that is used), pack/tokens (slots that
    are used, which is how many tokens an update computes), pack/saved (the share of tokens that
    sharing prefixes saved), pack/faults, pack/empty and pack/uninformative (trajectories that are
    left out); with documents pack/document_tokens (those of pack/tokens that stand in documents),
    and, where rows are cut, pack/documents_cut (documents that lie on several devices).

    Raises:
      ValueError: a trajectory fits no row; the batch does not fit ``rows``; lengths or prompts
        within a group disagree; a log-probability or an advantage is not finite; or a token is
        older than max_staleness or newer than ``version``. The message names task, index and
        numbers.
    """
    chosen, count, counts = select(groups, advantages, config, version, late)
    rows = laid_out(chosen, config)
    pieces = [piece for members in rows for piece in members]
    used = sum(piece.tokens for piece in pieces)
    targets = sum(piece.targets for piece in pieces)
    if len(rows) > config.rows:
        raise ValueError(
            f"the batch needs {len(rows)} rows ({used} slots, {targets} targets in {len(pieces)} "
            f"pieces); rows={config.rows} of slots={config.slots}, targets={config.targets} and "
            f"runs={config.runs}"
        )
    batch = empty_batch(config, config.rows, count, choices)
    for row, members in enumerate(rows):
        write_row(batch, row, members, config, version)
    unshared = sum(example.unshared for piece in pieces for example in piece.examples)
    metrics = {
        "pack/fill": used / max(len(rows) * config.slots, 1),
        "pack/target_fill": targets / max(len(rows) * config.targets, 1),
        "pack/rows": float(len(rows)),
        "pack/tokens": float(used),
        "pack/saved": 1.0 - used / unshared if unshared else 0.0,
    }
    if config.documents is not None:
        inside = sum(piece.document_tokens for piece in pieces)
        metrics["pack/document_tokens"] = float(inside)
        if config.parts > 1:
            metrics["pack/documents_cut"] = float(cut_documents(tokens_of(batch), config.parts))
    return batch, metrics | counts


def empty_batch(
    config: PackConfig,
    rows: int,
    num_trajectories: int = 0,
    choices: Mapping[str, jax.ShapeDtypeStruct] = MappingProxyType({}),
) -> Batch:
    """A batch of padding: numpy arrays with the shapes and dtypes that ``pack`` returns.

    ``pack`` fills such a batch in place. num_trajectories: the number that padding has in
    ``Batch.trajectories``, one more than that of the last trajectory. choices: as for ``pack``.
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
        documents=None if config.documents is None else slots(),
        order=None if config.documents is None else slots(),
        choices=picks.empty(choices, rows, config.targets),
        demonstrated=targets(0, np.float32) if config.demonstrated else None,
    )


def tokens_of(batch: Batch) -> Tokens:
    """The rule of who sees whom in the rows of a batch."""
    if batch.documents is None:
        return packed_rows(batch.segments, batch.branches, batch.positions)
    return Tokens(batch.segments, batch.branches, batch.documents, batch.order)


def _pieces(examples: list[Example], config: PackConfig) -> list[Piece]:
    """Splits a group into pieces that each fit a row, into one piece if that is possible.

    Raises ValueError for a trajectory that fits no row.
    """

    def shared(part: list[Example]) -> tuple[Piece, np.ndarray, bool]:
        piece = share(part, levels=config.levels, align=config.align)
        takes = needs(piece, config)
        return piece, takes, bool(np.all(takes <= room(config)))

    if not examples:
        return []
    whole, _, fits = shared(examples)
    if fits:
        return [whole]
    # Trajectories stay in order. Each joins the last piece if that still fits a row then, and
    # begins a new piece if not.
    pieces: list[Piece] = []
    for example in examples:
        t = example.trajectory
        alone, takes, fits = shared([example])
        if config.runs and takes[2] > config.runs:
            raise ValueError(
                f"task {t.task_id!r} trajectory {t.index} has {takes[2]} runs; set "
                f"train.pack.runs={takes[2]} or more, now {config.runs}"
            )
        if not fits:
            raise ValueError(
                f"task {t.task_id!r} trajectory {t.index} needs {takes[0]} slots and {takes[1]} "
                f"targets; a row has slots={config.slots} and targets={config.targets}"
            )
        if pieces:
            longer, _, fits = shared([*pieces[-1].examples, example])
        if pieces and fits:
            pieces[-1] = longer
        else:
            pieces.append(alone)
    return pieces


def laid_out(chosen: Sequence[Sequence[Example]], config: PackConfig) -> list[list[Piece]]:
    """The pieces of each row, for the examples of each group; as many rows as it takes.

    Raises ValueError for a trajectory that fits no row.
    """
    pieces = [piece for examples in chosen for piece in _pieces(list(examples), config)]
    return _first_fit(pieces, config)


def write_row(
    batch: Batch, row: int, members: Sequence[Piece], config: PackConfig, version: int
) -> None:
    """Writes pieces into an empty row of a batch of numpy arrays, in place."""
    slots = _slots_of(config)
    taken = sum(int(_taken(piece, config).sum()) for piece in members)
    slots.spare = max(0, slots.spare - taken)
    writer = RowWriter(batch, row, slots, version)
    segments = itertools.count(1)  # 0 marks padding
    for piece in members:
        writer.write(piece, segments)


def _first_fit(pieces: list[Piece], config: PackConfig) -> list[list[Piece]]:
    """The pieces of each row, by first fit, the largest first. Pieces of equal size keep their
    order, so the same groups always give the same batch.

    Where rows are cut, a piece goes to the first row in which none of its documents need be cut. If
    only an empty row is one, and there is one left, the piece goes there.
    """
    rows: list[list[Piece]] = []
    free: list[np.ndarray] = []
    slots: list[Slots] = []  # as if no document were cut
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        takes = needs(piece, config)
        runs = [node.documents for node in piece.nodes]
        fitting = (i for i, left in enumerate(free) if np.all(takes <= left))
        first = next(fitting, None)
        row = first
        while row is not None and slots[row].after(runs).end > config.slots:
            row = next(fitting, None)
        if row is None and len(rows) == config.rows:
            row = first
        elif row is None and first is not None:
            cut = _slots_of(config).after(runs).end > config.slots
            row = first if cut else None
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(room(config))
            slots.append(_slots_of(config))
        rows[row].append(piece)
        free[row] -= takes
        slots[row] = slots[row].after(runs)
    return rows


def select(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    config: PackConfig,
    version: int,
    late: int = 0,
) -> tuple[list[list[Example]], int, dict[str, float]]:
    """``examples_of`` with the limits of the config. late: as of ``pack``."""
    own = len(groups) - late
    return examples_of(
        groups,
        advantages,
        drop_uninformative=config.drop_uninformative,
        max_staleness=[config.max_staleness] * own + [config.late_staleness] * late,
        version=version,
        documents=config.documents,
        untrained=config.untrained,
    )
