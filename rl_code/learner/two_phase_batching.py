"""Packs groups for updates in two phases: prompts in rows of their own (``Prompts``), and what
follows them in the rows of a Batch.

Prompts need no trajectories, so they are laid out before anything is sampled. Row r of the Batch
holds what follows the prompts in row r of ``Prompts``. The last token of a prompt does not stand
with the prompt. Everything that follows the prompt begins with that token instead, so that every
target is predicted from a slot of the Batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tokens import Tokens, packed_rows
from rl_code.learner.advantages import Credit
from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, empty_batch, needs, room, select
from rl_code.learner.prefix_tree import RowWriter, share
from rl_code.learner.row_slots import Slots
from rl_code.types import Group, Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """Rows of prompts for a two-phase update, int32 [R, P] each.

    Prompt i stands in row i % R as segment 1 + i // R, without its last token.
    """

    # Token ids.
    tokens: jax.Array
    # Positions in the prompt, from 0.
    positions: jax.Array
    # The segment of each token, from 1; 0 for padding.
    segments: jax.Array

    @property
    def where(self) -> Tokens:
        """The rule of who sees whom."""
        return packed_rows(self.segments, jnp.zeros_like(self.segments), self.positions)


def pack_prompts(prompts: Iterable[Sequence[int]], config: PackConfig) -> Prompts:
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
    """Packs what the trajectories of each group add to their prompt; otherwise as ``pack``.

    prompts: what ``pack_prompts`` laid out; prompt i is that of group i.

    Raises:
      ValueError: as ``pack``; or a group has another prompt than the one that was laid out; or what
        follows the prompts of a row does not fit the row.
    """
    chosen, count, metrics = select(groups, advantages, config, version)
    batch = empty_batch(config, config.rows, count)
    slots = [Slots(config.align, config.slots, spare=0) for _ in range(config.rows)]
    writers = [RowWriter(batch, row, own, version) for row, own in enumerate(slots)]
    takes = np.zeros((config.rows, 3), int)  # slots, targets and runs that each row uses
    laid_out = np.asarray(prompts.tokens)
    segments = np.asarray(prompts.segments)
    # Segments of contexts that do not start with their group's prompt. A row has at most
    # ceil(groups / rows) prompts, so these numbers begin after the segments of all prompts.
    own_segments = [itertools.count(1 + -(-len(groups) // config.rows)) for _ in writers]
    tokens = int(np.sum(segments > 0))
    unshared = 0
    for number, (group, examples) in enumerate(zip(groups, chosen, strict=True)):
        row = number % config.rows
        segment = 1 + number // config.rows
        prompt = laid_out[row, segments[row] == segment]  # without its last token
        for example in examples:
            _check_prompt(example.trajectory, prompt, number)
        if not examples:
            # Nothing of this group is trained on, but its prompt stands in the row as a run.
            takes[row, 2] += 1
            continue
        piece = share(examples, levels=2, align=config.align, held=1)
        # ``needs`` counts what follows the prompt, whose own node is empty here. The prompt itself
        # is one run more.
        takes[row] += needs(piece, config)
        takes[row, 2] += 1
        if np.any(takes[row] > room(config)):
            raise ValueError(
                f"row {row} needs {takes[row, 0]} slots, {takes[row, 1]} targets and "
                f"{takes[row, 2]} runs for task {group.task.id!r} and those before; it has "
                f"slots={config.slots}, targets={config.targets} and runs={config.runs}"
            )
        writers[row].write(piece, own_segments[row], segment)
        tokens += piece.tokens
        unshared += sum(example.unshared for example in examples)
    filled = int(np.sum(takes[:, 1] > 0))
    return batch, metrics | {
        "pack/fill": tokens / (filled * config.slots + config.rows * config.prompt_slots),
        "pack/target_fill": takes[:, 1].sum() / max(filled * config.targets, 1),
        "pack/rows": float(filled),
        "pack/tokens": float(tokens),
        "pack/saved": 1.0 - tokens / unshared if unshared else 0.0,
    }


def _check_prompt(t: Trajectory, prompt: np.ndarray, number: int) -> None:
    """Raises ValueError if the trajectory has another prompt than the one that was laid out.

    prompt: int32 [...], without its last token.
    """
    if t.prompt_length != len(prompt) + 1 or not np.array_equal(
        t.contexts[0].tokens[: len(prompt)], prompt
    ):
        raise ValueError(f"task {t.task_id!r}: its prompt is not prompt {number} of those laid out")
