"""What the sampler chose travels with its tokens, and the trainer compares or replays it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import compressed
from attention.methods.dsa import DSA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.sharding import MeshConfig, make_mesh
from rl_code.environment.documents import DocumentsConfig
from rl_code.learner import picks
from rl_code.learner.batching import PackConfig, pack
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from rl_code.store import serialization
from tests.rl_code.learner.conftest import make_group, make_trajectory
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    ONE_LAYER,
    SAMPLING,
    STOP,
    Letters,
    assert_same,
    initial,
    model_on,
    play,
    task_of,
)
from tests.rl_code.rollout.trainer_metrics import gradient_of, metrics_of, packed
from tests.rl_code.rollout.with_documents import (
    LONGEST,
    WITH_DOCUMENTS,
    DocumentEpisode,
    document,
)
from tests.rl_code.rollout.with_documents import task_of as task_of_documents
from tests.rl_code.trajectories import with_context

SPARSE = NSA(block=4, length=4, stride=2, picks=4, initial=1, local=1, window=4)
CHOOSING = dataclasses.replace(ONE_LAYER, attention=(SPARSE,))
NOTING = dataclasses.replace(ENGINE, note_picks=True)
PACK = PackConfig(rows=8, slots=192, targets=96, drop_uninformative=False, runs=6, max_staleness=9)


@functools.cache
def sampled(note: bool = True, dtype: str = "float32"):
    model = dataclasses.replace(CHOOSING, dtype=dtype, param_dtype=dtype)
    engine = dataclasses.replace(NOTING if note else ENGINE, cache_dtype=dtype)
    return play([task_of(seed) for seed in range(2)], engine=engine, model=model)[0]


def batch_of(groups):
    return packed(groups, PACK, picks.shapes(CHOOSING, PACK.slots))


def trained(groups, replay: bool):
    """(gradient, metrics) of one batch."""
    return gradient_of(initial(CHOOSING), batch_of(groups), PACK.runs, replay)


@pytest.mark.long
def test_noting_changes_no_token_and_says_what_was_chosen():
    noted = sampled()
    assert_same(noted, sampled(note=False))
    for group in noted:
        for t in group.trajectories:
            (context,) = t.contexts
            blocks = context.choices["blocks"]
            assert blocks.dtype == np.uint8
            assert blocks.shape == (context.sampled.sum(), 1, CHOOSING.num_kv_heads, SPARSE.picks)
            # the first block, and the one that the query lies in, are always among them
            before = np.flatnonzero(context.sampled) - 1
            for block in (0 * before, before // SPARSE.block):
                assert np.all(np.any(blocks == block[:, None, None, None], axis=-1))
            assert np.all(
                (blocks <= (before // SPARSE.block)[:, None, None, None]) | (blocks == 255)
            )
    assert all(
        t.contexts[0].choices is None for group in sampled(note=False) for t in group.trajectories
    )


@pytest.mark.long
def test_a_trainer_that_chooses_alike_replays_the_same_bits():
    compared = trained(sampled(), replay=False)
    replayed = trained(sampled(), replay=True)
    assert compared[1]["policy/picks_overlap"] == compared[1]["policy/picks_equal"] == 1.0
    assert compared[1]["policy/mismatch_max"] < 1e-3
    assert compared[1] == replayed[1]
    for one, other in zip(*(jax.tree.leaves(x[0]) for x in (compared, replayed)), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.long
def test_replay_undoes_what_other_scores_of_blocks_do(monkeypatch):
    """The scores of the trainer's blocks are off, as those of other kernels may be."""
    choose = compressed.choose

    def off(scores, *rest):
        noise = jnp.sin(
            7.0 * jnp.arange(scores.shape[-1]) + 3.0 * jnp.arange(scores.shape[1])[:, None]
        )
        return choose(scores + 0.2 * noise[None, :, None], *rest)

    monkeypatch.setattr(compressed, "choose", off)
    compared, replayed = (
        metrics_of(initial(CHOOSING), batch_of(sampled()), PACK.runs, replay, anew=True)
        for replay in (False, True)
    )
    assert compared["policy/picks_overlap"] < 0.98 and compared["policy/picks_equal"] < 0.95
    assert compared["policy/mismatch_max"] > 1e-2
    assert replayed["policy/mismatch_max"] < 1e-3
    # how the trainer's own choice agrees is told in both cases; one layer chooses here
    for name in ("policy/picks_overlap", "policy/picks_equal"):
        assert replayed[name] == compared[name]


@pytest.mark.long
def test_the_compressed_branch_keeps_its_gradient_under_replay():
    gradient, _ = trained(sampled(), replay=True)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    own = [x for path, x in leaves if "compressed_k" in jax.tree_util.keystr(path)]
    assert own and all(np.any(np.asarray(x)) for x in own)


@pytest.mark.long
def test_groups_without_picks_are_trained_as_the_trainer_chooses():
    bare = sampled(note=False)
    _, metrics = trained(bare, replay=True)
    _, noted = trained(sampled(), replay=False)
    assert metrics["policy/picks_overlap"] == metrics["policy/picks_equal"] == 0.0
    assert metrics["train/loss"] == noted["train/loss"]


@pytest.mark.long
def test_a_query_that_several_trajectories_continue_counts_once():
    batch = batch_of(sampled())
    some = np.any(batch.choices["blocks"] != 255, axis=(2, 3, 4))
    for row in range(len(some)):
        real = batch.mask[row] > 0
        # the prompt's last token predicts the first token of every trajectory
        assert (
            len(set(batch.sources[row, real])) == some[row].sum() < max(real.sum(), 1)
            or not real.any()
        )


@pytest.mark.long
def test_records_keep_picks_and_records_without_them_are_the_same_bytes():
    noted = sampled()[0].trajectories[0]
    (context,) = noted.contexts
    bare = dataclasses.replace(noted, contexts=(dataclasses.replace(context, choices=None),))
    back = serialization.loads(serialization.dumps(noted))
    assert np.array_equal(back.contexts[0].choices["blocks"], noted.contexts[0].choices["blocks"])
    assert b"choices" not in serialization.dumps(bare)
    assert serialization.loads(serialization.dumps(bare)).contexts[0].choices is None


@pytest.mark.long
def test_single_keys_of_an_indexer_are_noted_and_replayed():
    """A trainer whose indexer ranks otherwise attends to what the sampler chose."""
    indexer = DSA(12, None, 6, 20, picks=9, index_heads=3, index_size=8)
    config = dataclasses.replace(MODEL, attention=(Window(6), indexer))
    groups = play([task_of(seed) for seed in range(2)], engine=NOTING, model=config)[0]
    for group in groups:
        for t in group.trajectories:
            (context,) = t.contexts
            tokens = context.choices["blocks"]
            assert tokens.shape == (context.sampled.sum(), 1, 1, 9)
            before = np.flatnonzero(context.sampled) - 1
            real = tokens[:, 0, 0] != 255
            assert np.all((tokens[:, 0, 0] <= before[:, None]) | ~real)
            assert np.array_equal(real.sum(axis=1), np.minimum(before + 1, 9))
    batch = packed(groups, PACK, picks.shapes(config, PACK.slots))
    model = initial(config)
    metrics = metrics_of(model, batch, PACK.runs)
    assert metrics["policy/picks_equal"] == 1.0 and metrics["policy/mismatch_max"] < 1e-3
    other = jax.tree.map(lambda x: x, model)
    other.attention_1.index_weights[...] = -other.attention_1.index_weights[...]
    compared, replayed = (metrics_of(other, batch, PACK.runs, replay) for replay in (False, True))
    assert compared["policy/picks_overlap"] < 0.9 and compared["policy/mismatch_max"] > 1e-2
    assert replayed["policy/mismatch_max"] < 1e-3
    assert replayed["policy/picks_overlap"] == compared["policy/picks_overlap"]


def test_picks_of_another_model_are_refused_in_words():
    other = dataclasses.replace(MODEL, attention=(SPARSE,))
    # as the sampler notes them where one layer chooses
    blocks = np.zeros((3, 1, CHOOSING.num_kv_heads, SPARSE.picks), np.uint8)
    noted = make_trajectory([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], prompt_length=2)
    noted = with_context(noted, choices={"blocks": blocks})
    with pytest.raises(
        ValueError, match=r"noted for \d+ sampled tokens; the model chooses \(2, 2, 4\)"
    ):
        pack(
            [make_group([noted] * 4)] * 2,
            [[1.0] * 4] * 2,
            PACK,
            version=1,
            choices=picks.shapes(other, PACK.slots),
        )


def batch_with_documents(sampling: MeshConfig):
    """What a mesh samples of files in prompts and answers, of which those in the prompts stand in a
    batch once; and the runs of a row.
    """
    files = [document(seed, 3 + 5 * seed % 14) for seed in range(5)]
    tasks = [
        task_of_documents(
            f"task{seed}",
            [([5 + seed, 6], False), (files[seed], True), (files[3], True), ([7, 8], False)],
            [[(files[4], True)], [(files[seed + 1], True)]],
        )
        for seed in range(2)
    ]
    engine = dataclasses.replace(WITH_DOCUMENTS, note_picks=True)
    mesh = make_mesh(sampling)
    scheduler = Scheduler(
        Engine(CHOOSING, engine, SAMPLING, (STOP,), mesh),
        Letters(),
        workers=4,
        worker_deadline_s=30.0,
    )
    groups, _ = play(tasks, make=DocumentEpisode, scheduler=scheduler, model=CHOOSING)
    scheduler.close()
    config = dataclasses.replace(
        PACK,
        slots=256,  # so few that each part of a row on a mesh has tokens
        runs=40,
        documents=DocumentsConfig(longest=LONGEST, shortest=1, page=ENGINE.page),
    )
    return packed(groups, config, picks.shapes(CHOOSING, config.slots)), config.runs


def trained_on(batch, runs: int, training: MeshConfig) -> tuple:
    """(The gradient on a mesh by the sampler's choice, its metrics)."""
    mesh = make_mesh(training)
    with jax.set_mesh(mesh):
        return gradient_of(model_on(mesh, CHOOSING), batch, runs, replay=True)


@pytest.mark.long
def test_documents_and_meshes_keep_blocks_where_they_are():
    """On one device and on a mesh the trainer chooses as the sampler did, which its own choice and
    its gradient by the sampler's choice show.
    """
    batch, runs = batch_with_documents(MeshConfig(data=2, tensor=2))
    gradient, alone = trained_on(batch, runs, MeshConfig())
    cut, on_mesh = trained_on(batch, runs, MeshConfig(data=2, context=2, tensor=2))
    for metrics in (alone, on_mesh):
        assert metrics["policy/picks_overlap"] == metrics["policy/picks_equal"] == 1.0
        assert metrics["policy/mismatch_max"] < 1e-3
    assert alone.keys() == on_mesh.keys()
    for name, value in alone.items():
        if name != "policy/mismatch_max":
            np.testing.assert_allclose(on_mesh[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    leaves = jax.tree.leaves(gradient)
    scale = max(np.abs(x).max() for x in leaves)
    for one, other in zip(jax.tree.leaves(cut), leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale)
