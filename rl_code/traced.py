"""The programs of a run, traced for devices that need not be here: what an update, a prefill and a
decode dispatch are made of.

Nothing is compiled and no array of the model is made.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from models.model_config import ModelConfig
from models.sharding import use_mesh
from models.transformer import Transformer, abstract_model
from rl_code.learner.batching import empty_batch
from rl_code.learner.optimizer import make_optimizer
from rl_code.learner.update import TrainState, make_update
from rl_code.rollout.engine import Engine
from rl_code.run_config import RunConfig


def traced_programs(
    config: RunConfig,
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    *,
    learns: bool = True,
    samples: bool = True,
) -> dict[str, jax.stages.Traced]:
    """The programs of a run on one mesh: "update" where it learns, and those of the engine, such as
    "prefill" and "decode", where it samples.

    config: with its derived sizes. An update in two phases is traced as one phase, which calls the
    same kernels. model: its dtype is that of training and sampling.
    """
    found = {}
    if learns:
        with use_mesh(mesh):
            found["update"] = _update(config, abstract_model(model, mesh))
    if samples:
        engine = Engine(model, config.rollout.engine, config.rollout.sampling, (0,), mesh)
        found |= engine.traced(abstract_model(model, mesh, whole=True))
    return found


def _update(config: RunConfig, model: Transformer) -> jax.stages.Traced:
    train = config.train
    loss = train.loss.for_staleness(train.pack.max_staleness)
    # a function with the methods of ``jax.jit``, see ``jit_step``
    update: Any = make_update(loss, train.optimizer, train.micro_batches, train.pack.runs)
    moments = jax.eval_shape(lambda x: make_optimizer(train.optimizer).init(x), model)
    state = TrainState(model, moments, jax.ShapeDtypeStruct((), jnp.int32))
    batch = _shapes(empty_batch(train.pack, train.pack.rows))
    prox = batch.mask if train.epochs > 1 else None
    ref = batch.mask if loss.kl_coef else None
    return update.trace(state, batch, prox, ref)


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype), arrays)
