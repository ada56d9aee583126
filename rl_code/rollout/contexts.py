"""Additions of the sampler to an episode's contexts: their random keys, and what is on record of
how their tokens were computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_code.types import Context, Trajectory


def context_key(key: Sequence[int], number: int) -> tuple[int, ...]:
    """The words of the random key of an episode's context, from those of its first, which are the
    episode's own: places of different contexts must not draw the same numbers.
    """
    if not number:
        return tuple(key)
    content = np.array([*key, number], np.uint32).tobytes()
    return tuple(
        np.frombuffer(hashlib.blake2b(content, digest_size=8).digest(), np.uint32).tolist()
    )


def with_keys(
    trajectory: Trajectory, keys: Sequence[tuple[int, int]], number: int = 0
) -> Trajectory:
    """The trajectory of an episode with ``Context.keys`` of a context, where several versions
    computed them.

    keys: pairs (place, version), of which some may have no key.
    """
    context = trajectory.contexts[number]
    # The last token has no key: nothing was sampled after it.
    ends = [place for place, _ in keys[1:]] + [context.kept + len(context.tokens) - 1]
    kept = [pair for pair, end in zip(keys, ends, strict=True) if pair[0] < end]
    if len({version for _, version in kept}) < 2:
        return trajectory
    return _with_context(trajectory, number, keys=tuple(kept))


def with_choices(
    trajectory: Trajectory, choices: Mapping[str, Sequence[np.ndarray]], number: int = 0
) -> Trajectory:
    """The trajectory of an episode with ``Context.choices`` of a context, where any were noted.

    choices: their parts, in the order in which tokens were sampled.
    """
    if not choices:
        return trajectory
    whole = {name: np.concatenate(parts) for name, parts in choices.items()}
    return _with_context(trajectory, number, choices=whole)


def noted_before(context: Context, length: int) -> dict[str, Any]:
    """The fields ``keys``, ``choices`` and ``cached`` of a row that stands behind the first
    ``length`` own tokens of a recorded context.
    """
    sampled = int(np.sum(context.sampled[:length]))
    choices = context.choices or {}
    return {
        "keys": list(context.keys or [(0, 0)]),
        "choices": {name: [x[:sampled]] for name, x in choices.items()},
        "cached": length,
    }


def _with_context(trajectory: Trajectory, number: int, **values: Any) -> Trajectory:
    """The trajectory with other values of some fields of a context."""
    contexts = list(trajectory.contexts)
    contexts[number] = dataclasses.replace(contexts[number], **values)
    return dataclasses.replace(trajectory, contexts=tuple(contexts))
