"""AdamW and Muon as optax chains, and the schedule of their learning rates."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (1711.05101) for all parameters, or with Muon for the matrices of the layers.

    The gradient is clipped by its global norm first.
    """

    # The learning rate of AdamW after the warm-up.
    learning_rate: float
    # The learning rate of Muon (2502.16982), which then updates the matrices of the layers; AdamW
    # keeps the other parameters. None for AdamW throughout.
    muon_learning_rate: float | None = None
    # After the warm-up the rates stay ("constant"), or fall to 0 at ``total_steps``.
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    # Updates in which the rates rise linearly.
    warmup_steps: int = 0
    # The update at which a falling schedule reaches 0. In a run None means the last update. Updates
    # without a gradient, of which the state keeps every bit, do not count (``make_update``). If
    # ``train.steps`` is raised on a finished run, a falling schedule is stretched: the rate, which
    # had reached 0, jumps to its value at this step of the longer schedule.
    total_steps: int | None = None
    # Decay of the average of gradients (AdamW's beta 1).
    b1: float = 0.9
    # Decay of the average of squared gradients (AdamW's beta 2).
    b2: float = 0.95
    # Added to the divisor of AdamW's update, so that it is never 0.
    eps: float = 1e-8
    # Weight decay of all parameters but norms and biases.
    weight_decay: float = 0.0
    # The largest global norm of the gradient; a longer gradient is scaled down to it. None clips
    # nothing.
    clip_norm: float | None = 1.0
    # Whether the moments wait in pinned memory of the host between updates, each of which brings
    # them to the device layer by layer (``learner.offload``).
    offload: bool = False

    def __post_init__(self):
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule={self.schedule!r} is not one of constant, cosine, linear")
        if not 0 <= self.warmup_steps < (self.total_steps or math.inf):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be in [0, total_steps={self.total_steps})"
            )
        for name in ("learning_rate", "muon_learning_rate", "clip_norm", "eps"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} must be at least 0")
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")


def learning_rate(config: OptimizerConfig, step: jax.Array | int) -> jax.Array:
    """The rate of update ``step`` (from 0): positive in the first, 0 from ``total_steps`` on unless
    constant.
    """
    rise = jnp.minimum(1.0, (step + 1.0) / max(config.warmup_steps, 1))
    if config.schedule == "constant":
        return config.learning_rate * rise
    if config.total_steps is None:
        raise ValueError(f"schedule={config.schedule!r} needs total_steps, to know where it ends")
    done = jnp.clip(
        (step - config.warmup_steps) / (config.total_steps - config.warmup_steps), 0.0, 1.0
    )
    fall = {
        "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
        "linear": 1.0 - done,
    }
    return config.learning_rate * rise * fall[config.schedule]


def decayed(model: Any) -> Any:
    """Pytree of booleans: which parameters weight decay touches, namely all but norms and
    biases.
    """

    def touches(path: tuple, _: jax.Array) -> bool:
        name = jax.tree_util.keystr(path)
        return "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(touches, model)


def make_optimizer(
    config: OptimizerConfig, norm: Callable[[Any], jax.Array] = optax.tree.norm
) -> optax.GradientTransformation:
    """The optax chain of the config; its moments have the dtype of the parameters it is initialised
    with.

    norm: of a gradient, by which it is clipped.
    """
    clip = optax.identity() if config.clip_norm is None else _clip(config.clip_norm, norm)
    schedule = functools.partial(learning_rate, config)
    if config.muon_learning_rate is None:
        adam = dict(b1=config.b1, b2=config.b2, eps=config.eps)
        return optax.chain(
            clip, optax.adamw(schedule, **adam, weight_decay=config.weight_decay, mask=decayed)
        )
    ratio = config.muon_learning_rate / config.learning_rate
    muon = optax.contrib.muon(
        lambda step: ratio * schedule(step),
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_learning_rate=schedule,
        muon_weight_dimension_numbers=matrix_dimensions,
    )
    return optax.chain(clip, muon)


def _clip(most: float, norm: Callable[[Any], jax.Array]) -> optax.GradientTransformation:
    """As ``optax.clip_by_global_norm``, with a norm of one's own."""

    def clipped(gradients: Any, _: Any = None) -> Any:
        length = norm(gradients)
        return jax.tree.map(
            lambda x: jnp.where(length < most, x, x / length.astype(x.dtype) * most), gradients
        )

    return optax.stateless(clipped)


def matrix_dimensions(model: Any) -> Any:
    """For each parameter the axes that a product contracts and those it makes, if it is a layer's
    matrix, else None.
    """

    def dimensions(leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        axes = leaf.get_metadata("logical_axes") if isinstance(leaf, nnx.Variable) else ()
        if "vocab" in axes or "embed" not in axes:
            return None
        embed = (axes.index("embed"),)
        # each layer, and each expert of it, has a matrix of its own
        matrix = range(leaf.get_metadata("stacks"), len(axes))
        others = tuple(i for i in matrix if i not in embed)
        if not others:
            return None
        reads_embed = embed < others
        return optax.contrib.MuonDimensionNumbers(
            *((embed, others) if reads_embed else (others, embed))
        )

    return jax.tree.map(dimensions, model, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
