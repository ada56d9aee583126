"""Packs the contexts that a teacher reads: those of the trajectories, perhaps with other prompts.

A teacher context has the same sampled tokens as the context of the policy. What the teacher says of
them is written to the places that they have in the policy's batch, so its rows need not be cut like
the policy's: they are filled by themselves, and there may be more of them than the policy's batch
has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, empty_batch, laid_out, write_row
from rl_code.learner.examples import Example
from rl_code.types import Context, Trajectory

# The prompt that a teacher reads in place of the policy's; None for a trajectory it is not asked
# about.
Prompt = Sequence[int] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TeacherRows:
    """As many rows of teacher contexts as the policy's batch has rows."""

    # Its log-probabilities, advantages and staleness mean nothing.
    batch: Batch
    # int32 [R, M], the place of each target among the R x M of the policy's batch, row by row;
    # R x M for padding.
    places: jax.Array


def with_prompts(examples: Sequence[Example], prompts: Sequence[Prompt]) -> list[Example]:
    """The examples of one group with other prompts, without those whose prompt is None.

    Contexts that do not begin with the group's prompt, such as those of sub-agents, stay as they
    are. Documents have no place in what is given and in what is returned.
    """
    asked = [pair for pair in zip(examples, prompts, strict=True) if pair[1] is not None]
    common = _common([prompt for _, prompt in asked])
    return [
        Example.of(_with_prompt(example.trajectory, prompt, common), example.number, 0.0, None)
        for example, prompt in asked
    ]


def _with_prompt(t: Trajectory, prompt: Sequence[int], common: int) -> Trajectory:
    """The trajectory with another prompt, each context a root with all of its tokens. Prefixes are
    found again when rows are written (``prefix_tree``).

    common: tokens that all of the group's prompts begin with.
    """
    length = t.prompt_length
    before = t.contexts[0].tokens[:length]
    contexts = []
    for index, context in enumerate(t.contexts):
        tokens = t.whole(index)
        # only a context's own tokens are its targets
        start = context.kept
        if len(tokens) >= length and np.array_equal(tokens[:length], before):
            tokens = np.concatenate([np.asarray(prompt, np.int32), tokens[length:]])
            start += len(prompt) - length
        contexts.append(_root(context, tokens, start))
    return dataclasses.replace(t, contexts=tuple(contexts), prompt_length=common)


def _root(context: Context, tokens: np.ndarray, start: int) -> Context:
    """A root with these tokens, those from ``start`` on sampled as in the context; a negative
    start leaves out the context's first tokens, of which none is sampled.
    """

    def own(values: np.ndarray, fill: float) -> np.ndarray:
        given = np.full(max(start, 0), fill, values.dtype)
        return np.concatenate([given, values[max(-start, 0) :]])

    return Context(
        tokens=tokens.astype(np.int32),
        sampled=own(context.sampled, False),
        logprobs=own(context.logprobs, 0.0),
        versions=own(context.versions, -1),
    )


def teacher_rows(
    chosen: Sequence[Sequence[Example]], batch: Batch, config: PackConfig, version: int
) -> Iterator[TeacherRows]:
    """The rows of teacher contexts, numpy arrays.

    Args:
      chosen: the examples of each group that the teacher is asked about.
      batch: the policy's, numpy arrays.
      config: shapes of the rows. As many rows as ``config.rows`` come at a time.
      version: of the learner's weights.

    Raises:
      ValueError: a trajectory fits no row.
    """
    starts = {number: place for number, place, _ in _spans(batch)}
    rows = laid_out(chosen, config)
    padding = batch.mask.size
    for first in range(0, len(rows), config.rows):
        part = empty_batch(config, config.rows)
        places = np.full(part.mask.shape, padding, np.int32)
        for row, members in enumerate(rows[first : first + config.rows]):
            write_row(part, row, members, config, version)
        for number, place, count in _spans(part):
            there = slice(place, place + count)
            here = starts[number] + np.arange(count)
            places.reshape(-1)[there] = here
            same = np.array_equal(batch.targets.reshape(-1)[here], part.targets.reshape(-1)[there])
            assert same, f"trajectory {number}: its teacher context has other targets"
        yield TeacherRows(part, places)


def _spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(number, first place, count) of the targets of each trajectory: neighbours in one row."""
    real = np.flatnonzero(batch.mask.reshape(-1) > 0)
    numbers = batch.trajectories.reshape(-1)[real]
    begins = np.flatnonzero(np.diff(numbers, prepend=-1) != 0)
    counts = np.diff(np.append(begins, len(real)))
    for begin, count in zip(begins, counts, strict=True):
        yield int(numbers[begin]), int(real[begin]), int(count)


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix; 0 for no prompts."""
    if not prompts:
        return 0
    size = min(map(len, prompts))
    rows = np.array([list(prompt[:size]) for prompt in prompts], np.int32).reshape(-1, size)
    differ = np.flatnonzero((rows != rows[0]).any(axis=0))
    return int(differ[0]) if differ.size else size
