"""AdamW and Muon as optax chains, and the schedule of their learning rates."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (1711.05101), for matrices Muon where asked for, behind a clip of the global gradient
    norm.

    muon_learning_rate: of the layers' matrices, which Muon (2502.16982) then updates; None for
    AdamW throughout. schedule: after ``warmup_steps`` of linear rise, the rates stay ("constant")
    or fall to 0 at ``total_steps``. weight_decay: not applied to norms and biases. clip_norm: None
    clips nothing.
    """

    learning_rate: float
    muon_learning_rate: float | None
    schedule: Literal["constant", "cosine", "linear"]
    warmup_steps: int
    total_steps: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self):
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule={self.schedule!r} is not one of constant, cosine, linear")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be in [0, total_steps={self.total_steps})"
            )
        if self.clip_norm is not None and self.clip_norm <= 0.0:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive or None")


def learning_rate(config: OptimizerConfig, step: jax.Array | int) -> jax.Array:
    """The rate of update ``step`` (from 0): positive in the first, 0 from ``total_steps`` on unless
    constant.
    """
    rise = jnp.minimum(1.0, (step + 1.0) / max(config.warmup_steps, 1))
    done = jnp.clip(
        (step - config.warmup_steps) / (config.total_steps - config.warmup_steps), 0.0, 1.0
    )
    fall = {
        "constant": jnp.ones(()),
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


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax chain of the config; its moments have the dtype of the parameters it is initialised
    with.
    """
    clip = (
        optax.identity()
        if config.clip_norm is None
        else optax.clip_by_global_norm(config.clip_norm)
    )
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


def matrix_dimensions(model: Any) -> Any:
    """For each parameter the axes that a product contracts and those it makes, if it is a layer's
    matrix, else None.
    """

    def dimensions(leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        axes = leaf.get_metadata("logical_axes") if isinstance(leaf, nnx.Variable) else ()
        if "vocab" in axes or "embed" not in axes or len(axes) < 3:
            return None
        embed = (axes.index("embed"),)
        others = tuple(i for i, name in enumerate(axes) if name not in ("layers", "embed"))
        reads_embed = embed < others
        return optax.contrib.MuonDimensionNumbers(
            *((embed, others) if reads_embed else (others, embed))
        )

    return jax.tree.map(dimensions, model, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
