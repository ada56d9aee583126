"""Parameters and moments that are cut over the mesh axis ``fsdp``: the same updates, in less memory
on each device, and the same again after a checkpoint.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from models.model_config import MoE
from models.quantised import MATRICES
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from models.transformer import abstract_model
from pallas_kernels.tokens import Tokens
from planner.collectives import Kind, sent_bytes
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.update import abstract_state, init_state
from rl_code.metrics.values import CompilationCounter
from tests.models.small import small_config
from tests.rl_code.learner.steps import (
    LOSS,
    OPTIMIZER,
    PACK,
    advantages_of,
    assert_close,
    assert_left_alone,
    first_step,
    fresh,
    shuffled_rows,
    update_for,
    without_targets,
)

SIZES = (3, 5, 2, 4, 3, 4, 1, 5)
MESH = MeshConfig(data=2, tensor=2, fsdp=2)


def packed(build):
    return pack(build.groups(SIZES, seed=1), advantages_of(SIZES), PACK, version=0)[0]


def placed(model, mesh):
    """A copy of a model on a mesh, which may be donated."""
    copy = fresh(model)
    with jax.set_mesh(mesh):
        return jax.device_put(copy, parameter_shardings(model, mesh))


def state_on(model, mesh):
    """The state before the first update."""
    model = placed(model, mesh)
    with jax.set_mesh(mesh):
        return init_state(model, OPTIMIZER)


def rows_of(mesh):
    return NamedSharding(mesh, partition_spec(("batch",)))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.long
def test_updates_are_those_of_one_device_and_go_on_bit_for_bit_from_a_checkpoint(build, tmp_path):
    alone, metrics_alone, _ = first_step(build.model(), packed(build))
    mesh = make_mesh(MESH)
    state = state_on(build.model(), mesh)
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    with jax.set_mesh(mesh), CompilationCounter() as compilations:
        batch = jax.device_put(shuffled_rows(packed(build)), rows_of(mesh))
        prox = batch.logprobs + 0.1 * np.cos(batch.targets)
        ref = batch.logprobs - 0.2 * np.sin(batch.targets)
        update = update_for(LOSS, OPTIMIZER, 2)
        state, metrics = update(state, batch, prox, ref)
        assert_close(optax.tree.get(state.opt_state, "mu"), alone)
        assert_close(metrics, metrics_alone)
        # every part is where it was, so that the next step is the same program
        assert [leaf.sharding for leaf in jax.tree.leaves(state)] == before
        wanted = [leaf.sharding for leaf in jax.tree.leaves(state.model)]
        for name in ("mu", "nu"):
            moments = jax.tree.leaves(optax.tree.get(state.opt_state, name))
            for leaf, layout in zip(moments, wanted, strict=True):
                assert leaf.sharding.is_equivalent_to(layout, leaf.ndim)
        with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
            checkpoints.save(1, state, {})
        restored = checkpoint.load(tmp_path, state).state
        compiled = compilations.count
        uninterrupted, _ = update(state, batch, prox, ref)
        resumed, _ = update(restored, batch, prox, ref)
        assert_same_bits(resumed, uninterrupted)
        idle = without_targets(batch)
        idle = dataclasses.replace(idle, mask=jax.device_put(idle.mask, batch.mask.sharding))
        after = assert_left_alone(update, resumed, idle, prox, ref)
        assert [leaf.sharding for leaf in jax.tree.leaves(after)] == before
        assert compilations.count == compiled


@pytest.mark.parametrize(
    "saved, restored",
    [
        (MeshConfig(1, 1, fsdp=4), MeshConfig(data=2, tensor=2)),
        (MeshConfig(data=2, tensor=2), MeshConfig(1, 1, fsdp=4)),
    ],
)
@pytest.mark.quick(first=1)
def test_checkpoints_go_from_and_to_meshes_with_fsdp(build, tmp_path, saved, restored):
    meshes = [make_mesh(config) for config in (saved, restored)]
    state, wanted = (state_on(build.model(), mesh) for mesh in meshes)
    # moments that are not zeros
    moments = {name: placed(build.model(), meshes[0]) for name in ("mu", "nu")}
    state = dataclasses.replace(state, opt_state=optax.tree.set(state.opt_state, **moments))
    with jax.set_mesh(meshes[0]), Checkpoints(tmp_path, {}, keep=1) as checkpoints:
        checkpoints.save(0, state, {})
    with jax.set_mesh(meshes[1]):
        found = checkpoint.load(tmp_path, wanted).state
    assert_same_bits(found, state)
    for leaf, like in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def compiled_update(config: MeshConfig):
    """The compiled update of a model whose parameters outweigh its activations, and its state."""
    shape = dict(embed_dim=128, mlp_dim=512, num_layers=12, vocab_size=256, remat=True)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        model = abstract_model(small_config(**shape), mesh)
        state = abstract_state(model, OPTIMIZER)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype, sharding=rows_of(mesh)),
            empty_batch(PackConfig(8, 16, 8, 0, False), 8),
        )
        lowered = update_for(LOSS, OPTIMIZER, 1).lower(state, batch, batch.mask, batch.mask)
        return lowered.compile(), state


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.long
def test_memory_of_a_device_falls_as_one_over_fsdp():
    (whole, state), (cut, _) = (compiled_update(MeshConfig(*n)) for n in ((8, 1, 1), (1, 1, 8)))
    memory, less = (program.memory_analysis() for program in (whole, cut))
    total = bytes_of(state)
    batch = memory.argument_size_in_bytes - total
    assert 0 <= batch < 0.02 * total
    # parameters and both moments, and what the program returns in their place
    assert less.argument_size_in_bytes - batch <= 1.01 * total / 8
    assert less.output_size_in_bytes <= 1.01 * total / 8 + batch
    # Gradients are cut too; only one layer's parameters and gradient are whole at a time.
    gradients = bytes_of(state.model)
    assert memory.temp_size_in_bytes > gradients
    assert less.temp_size_in_bytes < 0.6 * gradients

    # A gradient leaves the backward pass of its layer as a part.
    text = cut.as_text()
    shapes = re.findall(r"%\S*while\S* = \((.*?)\) while\(", text)
    stacked = [dims for carried in shapes for dims in re.findall(r"f32\[(12,[\d,]+)\]", carried)]
    parameters = {",".join(map(str, x.shape)) for x in jax.tree.leaves(state.model)}
    assert stacked and not parameters & set(stacked)
    assert "reduce-scatter" in text
    assert "all-to-all" not in text


def lowered_gradient(mesh, **shape):
    """The gradient of a small model, and the model."""
    # sizes that differ, so that a shape names a matrix
    shape = dict(embed_dim=64, mlp_dim=96, vocab_size=48, tied_embeddings=False) | shape
    with jax.set_mesh(mesh):
        model = abstract_model(small_config(**shape), mesh)
        tokens = jax.ShapeDtypeStruct((8, 16), np.int32, sharding=rows_of(mesh))

        def loss(model, tokens):
            zeros = jnp.zeros_like(tokens)
            where = Tokens(zeros + 1, zeros, zeros, zeros + jnp.arange(16))
            return jnp.sum(model.logits(model.hidden(tokens, where.order, where)))

        return jax.jit(jax.grad(loss)).lower(model, tokens), model


def test_matrices_travel_in_the_dtype_of_their_products():
    lowered, _ = lowered_gradient(make_mesh(MeshConfig(1, 1, fsdp=8)), dtype="bfloat16")
    text = lowered.as_text()
    constrained = re.findall(r"sharding_constraint .*tensor<([x\d]+)x(\w+)>", text)
    matrices = {"64x4x8", "64x2x8", "4x8x64", "64x96", "96x64", "64x48"}
    found = {dims: {t for d, t in constrained if d == dims} for dims in matrices}
    assert found == {dims: {"bf16"} for dims in matrices}
    # gradients of a layer's seven matrices on their way back
    scattered = re.findall(r"reduce_scatter.*?tensor<[x\d]+x(\w+)>\) -> ", text, re.DOTALL)
    assert scattered == ["bf16"] * 7


@pytest.mark.parametrize("moe", [None, MoE(experts=8, active=2, mlp_dim=32)])
@pytest.mark.quick(first=1)
def test_gradients_are_added_over_fsdp_and_their_parts_over_data(moe):
    mesh = make_mesh(MeshConfig(data=2, tensor=1, fsdp=4))
    lowered, model = lowered_gradient(mesh, moe=moe)
    sent = sent_bytes(lowered.compile().as_text(), domain=8)
    names = (*MATRICES, "router")
    found = [getattr(model.layers, name, None) for name in names]
    matrices = bytes_of([x for x in found if x is not None])
    assert sent[Kind("reduce-scatter", 4, False)] == matrices * 3 / 4
    # there and back, of a part
    assert sent[Kind("all-reduce", 2, False)] == 2 * matrices / 4 / 2
    # norms and both tables are added everywhere
    rest = bytes_of(model) - matrices
    assert sent[Kind("all-reduce", 8, False)] <= 2 * rest * 7 / 8
