"""Batch: groups packed into fixed shapes, the learner's input.

Dimensions: R rows, S slots of a row (tokens), M targets of a row (sampled tokens).
"""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Groups packed into fixed shapes: each prefix that trajectories or contexts share stands once,
    and what continues it follows.

    Token slots are [R, S]. Targets are [R, M], one per sampled token; those of a trajectory are
    neighbours in one row, and padding has weight 0.
    """

    # int32 [R, S], token ids.
    tokens: jax.Array
    # int32 [R, S], the position that RoPE rotates by. Without documents it is the place inside the
    # whole context: what continues a prefix of n tokens starts at n.
    positions: jax.Array
    # int32 [R, S], 1 + index of the tree inside the row; 0 for padding.
    segments: jax.Array
    # int32 [R, S], the node of the tree that the slot belongs to (``pallas_kernels.tokens``). 0 is
    # the root. Where a prompt is followed by one node for each trajectory, node 1 + i is that of
    # trajectory i. A slot sees the earlier slots of its own node and of those that its node
    # continues.
    branches: jax.Array
    # int32 [R, M], slot whose logits predict the target.
    sources: jax.Array
    # int32 [R, M], the token that was sampled.
    targets: jax.Array
    # float32 [R, M], the sampler's log-probability.
    logprobs: jax.Array
    # float32 [R, M].
    advantages: jax.Array
    # float32 [R, M], 1 for a target, 0 for padding.
    mask: jax.Array
    # int32 [R, M], number of the trajectory in the batch; padding has one more than the last.
    trajectories: jax.Array
    # float32 [R, M], how many sampled tokens the target's trajectory has; 1 for padding.
    lengths: jax.Array
    # int32 [R, M], version of the learner minus the version that sampled the token.
    staleness: jax.Array
    # int32 [R, S], the document of each slot: TAIL of ``pallas_kernels.tokens`` outside of
    # documents, n >= 1 in the n-th document of the context. None in a run without documents.
    documents: jax.Array | None = None
    # int32 [R, S], the place on the whole context, by which causality, windows and blocks count.
    # Padding of documents takes no slot, but counts. None in a run without documents, where it is
    # ``positions``.
    order: jax.Array | None = None
    # Choices of the sampler for each target (``Context.choices``), by name, [R, M, ...]. None in a
    # run that notes nothing.
    choices: dict[str, jax.Array] | None = None
    # float32 [R, M], the value before each target when the step began, and what the value function
    # learns to predict there. None in a run without values.
    values: jax.Array | None = None
    returns: jax.Array | None = None
    # float32 [R, M], 1 for a target that a demonstrator chose. None in a run without
    # demonstrations in its groups.
    demonstrated: jax.Array | None = None
