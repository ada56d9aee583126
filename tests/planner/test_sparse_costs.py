"""The planner's count of windows, NSA, MoBA and gated delta nets, beside hand and compiler."""

from __future__ import annotations

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import pytest

from attention import compressed, delta_rule, query_cost
from attention.blocks import entries, in_place
from attention.blockwise import blockwise_attention, mean_trips
from attention.cache.reader import PageReader
from attention.cache.tables import sequence_pages
from attention.cache.writer import PageWriter
from attention.chunks import CHUNK
from attention.methods.dense import Dense
from attention.methods.gated_delta import GatedDelta
from attention.methods.method import LayerShape, Method, PageShape
from attention.methods.moba import MoBA, moba_attention
from attention.methods.nsa import NSA, nsa_attention
from attention.methods.window import Window
from attention.query_cost import QueryCost
from models.families import PRESETS
from models.sharding import MeshConfig
from pallas_kernels.delta.api import chunked
from pallas_kernels.flash.blocks import visits
from pallas_kernels.tokens import TAIL, Tokens
from planner import arithmetic, attention_costs
from planner.flops import matmul_flops
from planner.targets import TARGETS
from planner.workload import Documents, Workload

# 64 heads of 128 elements, of which 16 share keys and values (2502.11089, section 4.1).
PAPER = LayerShape(2560, 64, 4, 128)
# Of compiled programs: 16 heads of 16 elements that share keys and values, rows and pages.
SMALL = LayerShape(16, 16, 1, 16)
ROW, PAGE, ROWS = 2048, 64, 2
ONE = MeshConfig()


def planned(name: str, *methods: Method, **own) -> Workload:
    """A row of a preset's model with other methods."""
    model = dataclasses.replace(PRESETS[name], dtype="bfloat16", remat=True)
    if methods:
        model = dataclasses.replace(model, attention=methods)
    sizes = dict(tokens=65536, context=65536, rows=64) | own
    return Workload(name, model, TARGETS["h100"], **sizes)


def test_layers_with_a_window_compute_and_read_the_window():
    """gpt-oss-20b: 24 layers of 64 heads of 64 elements, every other one with 128 keys."""
    job = planned("gpt-oss-20b")
    pair = 64 * 2 * 64
    made = attention_costs.needed(job.model, 65536, attention_costs.of_row(job), decode=False)
    # of 128 keys a block of 128 queries computes 256, and the mean query of a row sees half of it
    assert made.attended == pytest.approx(12 * (32768 + 128) * pair, rel=1e-3)
    assert made.masked == pytest.approx(12 * 128 * pair)
    learns = arithmetic.learner(job, ONE)
    passes = 5.5 * 2 * 65536
    assert learns.attention == pytest.approx(passes * (made.attended + made.masked))
    # eight key/value heads in two bytes
    read = attention_costs.read_bytes(job, 1)
    assert read == pytest.approx(12 * (32768 + 128) * 2 * 8 * 64 * 2, rel=1e-3)
    # the last eighth of a row sees 15/16 of it, but no more of a window
    last = attention_costs.needed(job.model, 65536, attention_costs.of_row(job, 8), decode=False)
    assert last.attended == 12 * (65536 * 15 / 16 + 128) * pair


def test_nsa_computes_and_reads_compressed_chosen_and_near_keys():
    """At 65,536 tokens: 4,095 compressed keys, 16 blocks of 64, the last 512."""
    costs = NSA().branch_costs(PAPER, 65536, 65536, decode=True)
    pair = 64 * 2 * 128
    # of its own block a query sees half; a window begins and ends within pages
    sums = {name: (cost.attended, cost.masked) for name, cost in costs.items()}
    assert sums == {
        "compressed": (4095 * pair, 0),
        "selected": (992 * pair, 32 * pair),
        "window": (512 * pair, 64 * pair),
    }
    # both MLPs of each of the 4 heads, for the two stretches that begin in the last 32 places
    mlp = 2 * 4 * (32 * 128 * 128 + 128 * 128)
    assert costs["compressed"].derived == 2 * mlp
    found = NSA().query_cost(PAPER, 65536, 65536, decode=False)
    assert found.attended == (4095 + 992 + 512) * pair
    # half a block of compressed keys, a block of the window, and of 4,096 queries half a tile of
    # 128 / 16 for each of the blocks that they see
    assert found.masked == (64 + 128 + 32 + 65536 * 64 / (4096 * 16)) * pair
    assert found.ranked == (4095 + 64) * pair / 2
    assert found.derived == mlp / 16


def test_parameters_that_compress_count_as_often_as_they_compress():
    """The MLPs of compressed keys hold 2 x 33 x 128 x 128 elements of a layer, which no hidden
    state is multiplied by; gates and projections are products like others.
    """
    job, dense = (planned("qwen3-8b", method) for method in (NSA(), Dense()))
    own = attention_costs.derived_elements(job.model)
    assert own == 36 * 2 * (33 * 128 * 128 + 32 * 128)
    # of 36 layers of 8 key/value heads: 4,096 x 4 x 8 x 128 of projections, 4,096 x 32 x 3 of gates
    added = 36 * (4096 * (4 * 8 * 128 + 32 * 3) + 2 * 8 * 33 * 128**2 / 16)
    learns = [arithmetic.learner(x, ONE) for x in (job, dense)]
    # matrices are multiplied in four passes, blocks are ranked in two
    needed = attention_costs.needed(job.model, 65536, attention_costs.of_row(job), decode=False)
    more = 2 * 65536 * (4 * added + 2 * needed.ranked)
    rest = [x.flops - x.attention for x in learns]
    assert rest[0] - rest[1] == pytest.approx(more, rel=1e-6)
    assert learns[0].attention < 0.13 * learns[1].attention
    # scores to choose by are cut with the heads, unlike those of an indexer
    half = arithmetic.learner(job, MeshConfig(tensor=2))
    assert 2 * (half.flops - half.attention) == pytest.approx(rest[0], rel=1e-3)
    # main, window, one compressed key of 16 tokens, and 32 raw keys of a page of 64
    kept = [attention_costs.cached_bytes(x.model) for x in (job, dense)]
    assert kept[0] == (2 + 1 / 16 + 1 / 2) * kept[1]
    samples = [arithmetic.actor(x, ONE) for x in (job, dense)]
    assert samples[0].hbm < 0.3 * samples[1].hbm


def test_moba_compares_with_every_block_and_computes_those_it_chose():
    """At 65,536 tokens: 128 means of blocks of 512, and three blocks of each head."""
    pair = 64 * 2 * 128
    found = MoBA().query_cost(PAPER, 65536, 65536, decode=True)
    assert found == QueryCost(1280 * pair, masked=256 * pair, ranked=128 * pair / 2)
    trained = MoBA().query_cost(PAPER, 65536, 65536, decode=False)
    # every head chooses alone: of 4,096 queries half a tile of 128 for each of 128 blocks
    assert trained.masked == (256 + 128 * 64 * 512 / 4096) * pair
    early = MoBA().query_cost(PAPER, 65536, 100, decode=True)
    assert (early.attended, early.masked) == (100 * pair, 256 * pair)
    job, dense = (planned("qwen3-8b", method) for method in (MoBA(), Dense()))
    means = 36 * 8 * 128 * 4 / 512
    kept = [attention_costs.cached_bytes(x.model) for x in (job, dense)]
    assert kept[0] - kept[1] == pytest.approx(means)


def test_tokens_of_documents_see_their_own_document():
    """Eight documents of 1,536 tokens and a tail of 4,096 that sees all: counted as the blocks that
    attention visits.
    """
    job = planned("qwen3-8b", tokens=16384, context=16384, documents=Documents(8, 1536))
    at = jnp.arange(16384, dtype=jnp.int32)[None]
    zeros = jnp.zeros_like(at)
    number = jnp.where(at < 8 * 1536, 1 + at // 1536, TAIL)
    tokens = Tokens(segments=zeros + 1, branches=zeros, documents=number, order=at)
    visited = visits(tokens, tokens, 64, 64, None)[0][..., 0]
    seen = attention_costs.of_row(job)
    assert sum(weight for weight, _ in seen) == pytest.approx(1.0)
    mean = sum(weight * keys for weight, keys in seen)
    assert 64 * float(jnp.mean(visited)) == pytest.approx(mean, rel=0.03)
    assert mean == pytest.approx((12288 * 768 + 4096 * 14336) / 16384)
    # only behind the documents something is sampled
    assert attention_costs.read_bytes(job, 1) == pytest.approx(36 * 14336 * 4096, rel=1e-3)
    # the second half of the row: a quarter of documents, and the tail
    last = dict((x, w) for w, x in attention_costs.of_row(job, 2))
    assert sum(w for x, w in last.items() if x < 1536) == pytest.approx(0.5)


# --- Compiled programs ----------------------------------------------------------------------------


@pytest.fixture
def in_xla(monkeypatch):
    """Sizes of blocks in XLA: of queries and keys, and room for a whole tile where half of one is
    expected.
    """
    monkeypatch.setattr(query_cost, "BLOCK", 64)
    monkeypatch.setattr(query_cost, "ROWS", 2 * query_cost.ROWS)


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(x, jnp.float32) for x in sizes]


def products(function, *arguments, trips: float = 1.0) -> float:
    program = jax.jit(function).lower(*arguments).compile()
    return matmul_flops(str(program.as_text()), unknown_trips=trips)


def rows_tokens() -> Tokens:
    at = jnp.arange(ROW, dtype=jnp.int32)[None]
    zeros = jnp.zeros_like(at)
    return Tokens(segments=zeros + 1, branches=zeros, documents=zeros, order=at)


@pytest.mark.long
@pytest.mark.usefixtures("in_xla")
def test_an_update_of_nsa_does_the_products_that_are_counted(monkeypatch):
    """With gradients. In XLA the window takes two products forward and five backward, as the chosen
    blocks do, and all queries have all picks. A query of one of two spans meets all compressed
    keys up to the span's end, and their scores are computed again in the backward pass.
    """
    monkeypatch.setattr(compressed, "SPANS", 2)
    method, window = NSA(), 512
    tokens = rows_tokens()
    own = {
        name: p.shape for name, p in method.parameters(SMALL).items() if name in method.derives()
    }
    keys = (1, ROW, 1, 16)

    def loss(q, main, raw, near, gates, tokens, parameters):
        blocks = in_place(tokens, method.block)
        made = method.compressed(parameters, raw, raw)
        beside, _ = blockwise_attention(q, near, near, tokens, tokens, window, 64)
        stretched = entries(blocks, method.length, method.stride)
        given = (q, made, (main, main), beside, gates, tokens, blocks, stretched, method)
        return jnp.sum(nsa_attention(*given) ** 2)

    given = shapes((1, ROW, 16, 16), keys, keys, keys, (1, ROW, 16, 3))
    parameters = dict(zip(own, shapes(*own.values()), strict=True))
    grad = jax.grad(loss, argnums=(0, 1, 2, 3, 6))
    found = products(grad, *given, tokens, parameters, trips=mean_trips(tokens, window, 64))

    def mean(name: str, lengths: list[float]) -> QueryCost:
        costs = [method.branch_costs(SMALL, ROW, x, decode=False)[name] for x in lengths]
        return QueryCost(*(statistics.mean(x) for x in zip(*costs, strict=True)))

    from_stretches = mean("compressed", [ROW / 2, ROW])
    selected = mean("selected", [ROW])
    row = planned("qwen3-8b", context=ROW)
    near = mean("window", [keys for _, keys in attention_costs.of_row(row)])
    wanted = 3.5 * sum(cost.attended + cost.masked for cost in (selected, near))
    wanted += 4 * from_stretches.attended + 3 * from_stretches.derived
    assert found == pytest.approx(2 * ROW * wanted, rel=0.01)


@pytest.mark.usefixtures("in_xla")
def test_an_update_of_moba_does_the_products_that_are_counted():
    method = MoBA(block=64, picks=16)

    def loss(q, k, v, tokens):
        return jnp.sum(moba_attention(q, k, v, tokens, in_place(tokens, 64), method)[0] ** 2)

    given = shapes((1, ROW, 16, 16), (1, ROW, 1, 16), (1, ROW, 1, 16))
    found = products(jax.grad(loss, argnums=(0, 1, 2)), *given, rows_tokens())
    cost = method.query_cost(SMALL, ROW, ROW, decode=False)
    wanted = 3.5 * (cost.attended + cost.masked) + cost.ranked
    assert found == pytest.approx(2 * ROW * wanted, rel=0.01)


# Three value heads for each of two key heads, of other sizes than those of attention.
DELTA = GatedDelta(key_heads=2, value_heads=6, key_size=32, value_size=48)


def of_delta(*lead: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of q, k, v, g and beta of DELTA."""
    return shapes(*((*lead, 2, *each) for each in ((32,), (32,), (3, 48), (3,), (3,))))


@pytest.mark.parametrize("passes", ["forward", "with gradients"])
def test_chunks_of_a_gated_delta_net_do_the_products_that_are_counted(passes):
    chunks = ROW // CHUNK
    (first,) = shapes((ROWS, 2, 3, 32, 48))
    parents = jax.ShapeDtypeStruct((ROWS, chunks), jnp.int32)
    given = (*of_delta(ROWS, chunks, CHUNK), first)

    def loss(*given):
        return jnp.sum(chunked(*given)[0] ** 2)

    function = loss if passes == "forward" else jax.grad(loss, argnums=tuple(range(6)))
    text = jax.jit(function).lower(*given, parents).compile().as_text()
    cost = DELTA.query_cost(SMALL, ROW, ROW, decode=False)
    learned = 0 if passes == "forward" else 2 * cost.derived + cost.repeated
    wanted = cost.derived + cost.inverted + learned
    assert matmul_flops(text) == pytest.approx(2 * ROWS * ROW * wanted, rel=0.01)


def test_a_decoded_token_of_a_gated_delta_net_goes_through_the_state_as_counted():
    (state,) = shapes((ROWS, 2, 3, 32, 48))
    program = jax.make_jaxpr(delta_rule.step)(state, *of_delta(ROWS))
    found = 0
    for line in program.eqns:
        sizes = [x.aval.size for x in (*line.invars, *line.outvars)]
        if line.primitive.name in ("mul", "add", "sub", "reduce_sum") and max(sizes) >= state.size:
            found += max(sizes)
    cost = DELTA.query_cost(SMALL, ROW, ROW, decode=True)
    assert found == 2 * ROWS * sum(cost)


def test_an_update_counts_states_and_their_systems(monkeypatch):
    """Qwen3.5's three of four layers, in place of dense ones: the same for rows of any length."""
    method = GatedDelta(key_heads=16, value_heads=32, key_size=128, value_size=128)
    job = planned("qwen3-8b", method, method, method, Dense())
    cost = method.query_cost(job.model.layer_shape, 65536, 32768, decode=False)
    assert cost == QueryCost(
        0.0,
        derived=16 * (2 * 64 * 128 + 2 * (3 * 128 * 128 + 64 * 128 + 64 * 256)),
        inverted=32 * (8**2 + 16**2 + 32**2),
        repeated=32 * 128**2,
    )
    learns = [arithmetic.learner(job, ONE)]
    monkeypatch.setattr(GatedDelta, "query_cost", lambda *_: QueryCost(0.0))
    learns.append(arithmetic.learner(job, ONE))
    # of 36 layers 27 have a state; with remat matrices are multiplied in four passes
    more = 2 * 65536 * 27 * (4 * cost.derived + 2 * cost.inverted + cost.repeated)
    assert learns[0].flops - learns[1].flops == pytest.approx(more, rel=1e-6)
    assert learns[0].attention == learns[1].attention


@pytest.mark.parametrize("method", [NSA(), MoBA(block=64, picks=16)], ids=["nsa", "moba"])
def test_a_decoded_token_does_the_products_that_are_counted(method):
    """Its keys are written and it attends, in two rows of 2,048 places."""
    count = ROW // PAGE
    pages = method.pages(PageShape(ROWS * count, 1, PAGE, 16, jnp.float32, layer=SMALL))
    own = {name: p.shape for name, p in method.parameters(SMALL).items()}

    def step(parameters, pages, q, new, gates, tables, lengths):
        places = lengths[:, None] - 1
        at = PageWriter(tables, places, PAGE, lambda keys, _: keys)
        keys = dict.fromkeys(("main", "raw", "window"), (new, new))
        written = method.write(pages, keys, at, parameters)
        view = sequence_pages(tables, lengths, PAGE)
        reader = PageReader(view, PAGE, q.dtype)
        return written, method.attend_pages(written, q, view.at(places)[0], reader, gates)

    given = shapes((ROWS, 1, 16, 16), (ROWS, 1, 1, 16), (ROWS, 1, 16, 3))
    where = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((ROWS, count), (ROWS,))]
    parameters = dict(zip(own, shapes(*own.values()), strict=True))
    found = products(step, parameters, pages, *given, *where)
    cost = method.query_cost(SMALL, ROW, ROW, decode=True)
    assert found == pytest.approx(2 * ROWS * sum(cost), rel=0.01)


def test_a_window_of_whole_rows_is_that_of_one_block_more():
    window = Window(512)
    assert window.query_cost(SMALL, ROW, 100, False) == QueryCost(100 * 512, masked=64 * 512)
    assert window.query_cost(SMALL, ROW, 1000, False) == QueryCost(512 * 512, masked=128 * 512)
