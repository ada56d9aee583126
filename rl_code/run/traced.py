"""The programs of a run, traced for devices that need not be here: what an update, a prefill and a
decode dispatch are made of.

Nothing is compiled and no array of the model is made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from models.lora import trained
from models.model_config import ModelConfig
from models.scalar_head import ScalarHead
from models.sharding import partition_spec, use_mesh
from models.transformer import Transformer, abstract_model
from rl_code.learner import offload
from rl_code.learner.batching import empty_batch
from rl_code.learner.optimizer import OptimizerConfig, make_optimizer
from rl_code.learner.update import TrainState, float32, make_update
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_function import Critic, ValueState, backbone_of
from rl_code.learner.value_update import make_value_update
from rl_code.rollout.engine import Engine
from rl_code.run.config import RunConfig


def traced_programs(
    config: RunConfig,
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    *,
    learns: bool = True,
    samples: bool = True,
) -> dict[str, jax.stages.Traced]:
    """The programs of a run on one mesh: "update" where it learns, and those of the engine, such as
    "prefill" and "decode", where it samples. With values "update" is that of the policy, and of a
    head on its backbone; "update, values" is that of a separate backbone.

    config: with its derived sizes. An update in two phases is traced as one phase, which calls the
    same kernels. model: its dtype is that of training and sampling.
    """
    found = {}
    if learns:
        with use_mesh(mesh):
            found |= _updates(config, abstract_model(model, mesh))
    if samples:
        engine = Engine(model, config.rollout.engine, config.rollout.sampling, (0,), mesh)
        found |= engine.traced(abstract_model(model, mesh, whole=True))
    return found


def _updates(config: RunConfig, model: Transformer) -> dict[str, jax.stages.Traced]:
    train = config.train
    loss = train.loss.for_staleness(train.pack.max_staleness)
    value = train.value
    joint = value if value is not None and value.backbone == "shared" else None
    shapes = (train.micro_batches, train.pack.runs)
    # a function with the methods of ``jax.jit``, see ``jit_step``
    update: Any = make_update(loss, train.optimizer, *shapes, value=joint)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(model, _moments(train.optimizer, model), count)
    batch = _shapes(empty_batch(train.pack, train.pack.rows))
    prox = batch.mask if train.epochs > 1 else None
    ref = batch.mask if loss.kl_coef else None
    if value is None:
        return {"update": update.trace(state, batch, prox, ref)}
    state = dataclasses.replace(state, value=_value(value, model))
    valued = dataclasses.replace(batch, values=batch.mask, returns=batch.mask)
    if joint is not None:
        return {"update": update.trace(state, valued, prox, ref)}
    alone: Any = make_value_update(value, *shapes)
    return {
        "update": update.trace(state, batch, prox, ref),
        "update, values": alone.trace(state, valued),
    }


def _value(config: ValueConfig, model: Transformer) -> ValueState:
    """The state of a value function, laid out as the policy's."""
    head = jax.eval_shape(lambda: ScalarHead(model.config.embed_dim))
    head = _laid_out(head, _mesh_of(model), None)
    critic = Critic(head, None if config.backbone == "shared" else backbone_of(model))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return ValueState(critic, _moments(config.optimizer, critic), count)


def _mesh_of(model: Any) -> Mesh | AbstractMesh:
    """The mesh of abstract parameters."""
    return next(iter(jax.tree.leaves(model))).sharding.mesh


def _moments(config: OptimizerConfig, model: Any) -> Any:
    """The optimizer's state, laid out as the parameters, and on the host where it is offloaded."""
    mesh = _mesh_of(model)
    kind = None
    if config.offload:
        # A GPU that is not here does not say which memories it has, and shardings over it lose the
        # kind.
        mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        kind = offload.KIND
    found = jax.eval_shape(lambda x: make_optimizer(config).init(float32(trained(x))), model)

    return _laid_out(found, mesh, kind)


def _laid_out(tree: Any, mesh: Mesh | AbstractMesh, kind: str | None) -> Any:
    """Abstract parameters or moments over a mesh, by their logical axes; kind: of the memory."""

    def laid_out(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return leaf
        spec = partition_spec(leaf.get_metadata("logical_axes"))
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), leaf
        )

    return jax.tree.map(laid_out, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype), arrays)
