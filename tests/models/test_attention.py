"""Every attention method in the model: documents, meshes and precision."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models import huggingface
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import Transformer, abstract_model
from pallas_kernels.tokens import sequences
from tests.attention.rows import Piece, documents, pack, relative
from tests.models.small import VOCABULARY, small_config, small_model

SPARSE = NSA(length=8, stride=4, block=16, picks=3, initial=1, local=1, window=10)
PATTERNS = {
    "dense": (Dense(),),
    "window": (Window(7),),
    "mixed": (Window(9), SPARSE, MoBA(block=16, picks=2), GatedDocuments()),
}
LENGTH = 128


@functools.cache
def model(pattern: str, **changes) -> Transformer:
    return small_model(PATTERNS[pattern], **changes)


@functools.partial(jax.jit, static_argnames="runs")
def logits(model, tokens, positions, where, runs=0):
    """Without ``runs``, every sequence and document starts at a slot that is a multiple of 16."""
    return model.logits(model.hidden(tokens, positions, where, runs, align=16))


def ids(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (1, length), np.int32)


@pytest.mark.parametrize("pattern", ["dense", "mixed"])
@pytest.mark.quick(first=1)
def test_documents_are_as_if_alone_and_the_tail_sees_them(pattern):
    lengths = [20, 33, 16]
    where = documents(lengths, tail=12, block=16)
    tokens = ids(3, where.shape[1])
    m = model(pattern)
    names = np.asarray(where.documents)[0]
    starts = {d: int(np.argmax(names == d)) for d in (1, 2, 3, -1)}
    first = np.array([starts[d] if d else 0 for d in names.tolist()])
    slots = np.arange(len(names), dtype=np.int32)
    positions = np.where(names > 0, slots - first, slots)[None].astype(np.int32)
    clean = np.asarray(logits(m, tokens, positions, where))
    # each document alone, behind which its row is padding
    longest = max(lengths)
    own = np.zeros((len(lengths), longest), np.int32)
    for row, length in enumerate(lengths):
        own[row, :length] = tokens[0, starts[row + 1] :][:length]
    alone = sequences(jnp.array(lengths), longest)
    apart = np.asarray(logits(m, own, alone.order, alone))
    for document, length in enumerate(lengths, start=1):
        at = slice(starts[document], starts[document] + length)
        assert relative(clean[0, at], apart[document - 1, :length]) < 1e-5
        other = tokens.copy()
        other[:, at] = (tokens[:, at] + 1) % VOCABULARY
        changed = np.asarray(logits(m, other, positions, where))
        others = (names > 0) & (names != document)
        assert np.array_equal(changed[:, others], clean[:, others])
        if pattern == "dense":
            assert not np.any(np.all((changed == clean)[0, names < 0], axis=-1))


@pytest.mark.parametrize("pattern", ["dense", "window", "mixed"])
@pytest.mark.quick(first=1)
def test_documents_behind_a_shared_prefix_do_not_depend_on_their_place(pattern):
    prefix, lengths, block, gap = 20, (20, 33, 16), 16, 16  # a gap of no less than any window
    parts = [np.asarray(ids(number, length)[0]) for number, length in enumerate((prefix, *lengths))]
    found = {}
    for order in ((0, 1, 2), (2, 0, 1)):
        where = documents([lengths[index] for index in order], 12, block, prefix, gap)
        documents_at = np.asarray(where.documents[0])
        tokens = np.zeros((1, where.shape[1]), np.int32)
        tokens[0, :prefix] = parts[0]
        # a document's own places follow the prefix; those of the tail come last
        positions = np.asarray(where.order).copy()
        for number, index in enumerate(order, start=1):
            at = np.flatnonzero(documents_at == number)
            tokens[0, at] = parts[1 + index]
            positions[0, at] = prefix + np.arange(len(at))
        out = np.asarray(logits(model(pattern), tokens, positions, where))[0]
        for number, index in enumerate(order, start=1):
            found.setdefault(index, []).append(out[documents_at == number])
        without = tokens.copy()
        without[0, :prefix] = (without[0, :prefix] + 1) % VOCABULARY
        changed = np.asarray(logits(model(pattern), without, positions, where))[0]
        if pattern != "window":  # whose gap hides the prefix from all
            assert not np.any(np.all(changed == out, axis=-1)[documents_at > 0])
    for one, other in found.values():
        assert relative(one, other) < 1e-5


@pytest.mark.long
def test_a_mesh_gives_equal_losses_and_gradients():
    where, _ = pack([Piece(9), Piece(40, (20, 17))], LENGTH)
    where = where.map(lambda x: jnp.repeat(x, 4, axis=0))
    tokens = np.concatenate([ids(seed) for seed in range(4)])
    # others are in tests/rl_code/learner/test_meshes.py
    m = small_model((SPARSE,), num_layers=2, remat=True, seed=1)
    results = []

    def loss(m, tokens, where):
        logp = jax.nn.log_softmax(logits(m, tokens, where.order, where, runs=5))
        return jnp.mean(jnp.take_along_axis(logp, tokens[..., None], axis=-1))

    for config in (MeshConfig(1, 1), MeshConfig(2, 2, fsdp=2)):
        mesh = make_mesh(config)
        with jax.set_mesh(mesh):
            placed = jax.device_put(m, parameter_shardings(m, mesh))
            results.append(jax.device_get(jax.jit(jax.value_and_grad(loss))(placed, tokens, where)))
    (value, gradient), (other, other_gradient) = results
    assert abs(value - other) < 1e-6
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("pattern", ["dense", "window"])  # the others may choose other blocks
@pytest.mark.quick(first=1)
def test_bfloat16_follows_float32(pattern):
    where = sequences(jnp.array([LENGTH]), LENGTH)
    tokens = ids(5)
    exact = logits(model(pattern), tokens, where.order, where)
    rounded = logits(model(pattern, dtype="bfloat16"), tokens, where.order, where)
    assert relative(rounded, exact) < 0.05


def test_formats_of_others_have_no_place_for_more_parameters(tmp_path):
    sparse = abstract_model(small_config(attention=(SPARSE,)))
    with pytest.raises(
        ValueError,
        match="huggingface checkpoints have no place for the parameters of attention=NSA",
    ):
        huggingface.save(tmp_path / "model", sparse, max_positions=64)


def test_layers_must_come_in_whole_periods():
    with pytest.raises(
        ValueError, match="num_layers=4 must be a multiple of the 3 layers of attention"
    ):
        small_model((Dense(), Dense(), SPARSE))


def test_a_forward_pass_copies_no_weights():
    m = abstract_model(small_config(attention=(Dense(),), embed_dim=64, mlp_dim=256))
    tokens = np.zeros((1, 4), np.int32)
    where = sequences(jnp.array([4]), 4)
    run = jax.jit(lambda m, tokens: m.hidden(tokens, where.order, where, align=16))
    memory = run.lower(m, tokens).compile().memory_analysis()
    # of four layers; one at a time may be copied
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(m.layers))
    assert memory.temp_size_in_bytes < weights / 2
