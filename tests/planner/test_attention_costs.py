"""The planner's count of attention to keys that an indexer chose, beside hand and compiler."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention import indexer
from attention.indexer import Scoring, attend_chosen, choose
from attention.methods.dsa import DSA
from attention.methods.method import LayerShape
from attention.query_cost import QueryCost
from models.families import PRESETS
from models.sharding import MeshConfig
from pallas_kernels.tokens import Tokens
from planner import arithmetic, attention_costs
from planner.flops import matmul_flops
from planner.targets import TARGETS
from planner.workload import Workload

V32 = dataclasses.replace(PRESETS["deepseek-v3.2"], dtype="bfloat16", remat=True)
JOB = Workload("deepseek-v3.2", V32, TARGETS["gb200"], tokens=16384, context=16384, rows=64)
ONE = MeshConfig()


def test_a_decoded_token_scores_what_it_sees_and_attends_to_its_picks():
    """61 layers, 128 heads of 2 x 512 + 64 elements, an indexer of 64 heads of 128 elements and a
    weight, 2,048 picks: of 16,384 tokens the mean one sees 8,192 and attends to 1,920.
    """
    picked = 2048 * (1 - 2048 / (2 * 16384))
    assert picked == 1920
    scored, chosen = 61 * 8192 * 64 * 129, 61 * picked * 128 * 1088
    found = attention_costs.needed(V32, 16384, attention_costs.of_decoding(JOB), decode=True)
    assert found == pytest.approx(QueryCost(0, chosen, scored), rel=1e-3)
    dense = dataclasses.replace(V32, attention=PRESETS["deepseek-v3"].attention)
    every = arithmetic.actor(dataclasses.replace(JOB, model=dense), ONE)
    # attention to all keys is 61 x 8,192 x 128 x 1,088 elements a token
    assert every.attention == pytest.approx(64 * 2 * 61 * 8192 * 128 * 1088, rel=1e-6)
    made = arithmetic.actor(JOB, ONE)
    assert made.attention == 0.0
    # the latent vectors of picks, and of all keys those of the indexer, in two bytes
    reads = attention_costs.read_bytes(JOB, 1)
    assert reads == pytest.approx(61 * 2 * (picked * 576 + 8192 * 128), rel=1e-3)
    # the indexer is on every device along tensor, its scores are not cut
    cut = arithmetic.actor(JOB, MeshConfig(tensor=8))
    rest = 2 * 64 * (scored + chosen / 8)
    assert cut.flops > rest > 0.1 * cut.flops


def test_an_update_scores_whole_rows_and_attends_to_as_many_keys_for_every_query():
    made = arithmetic.learner(JOB, ONE)
    short = arithmetic.learner(dataclasses.replace(JOB, context=2048), ONE)
    # rows in which nothing is chosen are those of MLA, of 128 + 64 and 128 elements
    assert made.attention == 0.0
    assert short.attention == pytest.approx(5.5 * 2 * 16384 * 61 * 1024 * 128 * 320, rel=1e-6)
    latent = attention_costs.of_layers(V32, 16384, 16384, decode=False)
    assert latent == QueryCost(0, 61 * 2048 * 128 * 1088, 61 * 16384 * 64 * 129)
    products = made.flops - 2 * 16384 * (4.5 * latent.chosen + 2 * latent.scored)
    assert products == pytest.approx(short.flops - short.attention, rel=1e-6)
    assert made.useful < made.flops


def test_layers_that_share_an_indexer_score_once_and_a_loss_scores_again():
    shape = LayerShape(8, 4, 4, 8)
    own = DSA(latent=16, picks=16, index_heads=3, index_size=8)
    shared, learns = (
        dataclasses.replace(own, **x) for x in ({"shared": True}, {"index_loss": 0.1})
    )
    sizes = (shape, 64, 64.0, False)
    assert own.query_cost(*sizes) == QueryCost(0, 16 * 4 * 40, 64 * 27)
    assert shared.query_cost(*sizes) == QueryCost(0, 16 * 4 * 40, 0)
    assert learns.query_cost(*sizes) == QueryCost(0, 16 * (4 * 40 + 27), 64 * 27)
    assert learns.query_cost(shape, 64, 64.0, True) == own.query_cost(shape, 64, 64.0, True)


def test_the_compiled_program_does_the_products_that_are_counted(monkeypatch):
    """Choice among 64 keys and attention to 16 of them, with gradients, 4 heads of 24 elements of
    which 16 are values, in several chunks of queries.
    """
    monkeypatch.setattr(indexer, "CHUNK", 2048)
    method = DSA(latent=16, picks=16, index_heads=3, index_size=8)
    shape = LayerShape(8, 4, 4, 8)
    count = 64
    at = jnp.arange(count, dtype=jnp.int32)[None]
    zeros = jnp.zeros_like(at)
    tokens = Tokens(segments=zeros + 1, branches=zeros, documents=zeros, order=at)

    def loss(q, latent, queries, keys, weights):
        picks = choose(Scoring(queries, keys, weights), tokens, tokens, 16)
        return jnp.sum(attend_chosen(q, latent, picks, 16, None, ())[0] ** 2)

    sizes = [(1, count, 4, 24), (1, count, 24), (1, count, 3, 8), (1, count, 1, 8)]
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (*sizes, (1, count, 3, 1))]
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    cost = method.query_cost(shape, count, count, False)
    plain = dataclasses.replace(V32, remat=False)
    wanted = 2 * count * (attention_costs.chosen_passes(plain) * cost.chosen + cost.scored)
    assert matmul_flops(str(program.as_text())) == pytest.approx(wanted, rel=0.03)
