"""A small engine and what it plays in tests: a model that depends on its context, tasks, episodes,
a tokenizer.
"""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention.cache.pages import PageAllocator
from attention.methods.dense import Dense
from attention.methods.dsa import DSA
from attention.methods.gated_delta import GatedDelta
from attention.methods.gated_documents import GatedDocuments
from attention.methods.mla import MLA
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.sinks import Sinks
from attention.methods.window import Window
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import Transformer
from pallas_kernels.tokens import packed_rows
from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.rollout.document_pool import DocumentPool
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.types import Context, Reward, Trajectory
from tests.models.small import small_config

STOP, VOCAB = 0, 40
MODEL = small_config(vocab_size=VOCAB, embed_dim=32, mlp_dim=64, num_layers=2, norm_eps=1e-6)
ONE_LAYER = dataclasses.replace(MODEL, num_layers=1)
ENGINE = EngineConfig(
    slots=3,
    episodes=8,
    page=4,
    pages=64,
    prefill_rows=2,
    prefill_tokens=4,
    prompt_length=16,
    length=64,
    decode_steps=5,
    cache_dtype="float32",
    view_block=32,
    tile=3,
)
SCARCE = dataclasses.replace(ENGINE, pages=18)  # episodes lose their pages
# Pages of caches, without documents and with: engines that differ in them alone share programs.
MOST_PAGES = {False: ENGINE.pages, True: 160}
FOR_ONE_GROUP = 36 * ENGINE.page  # tokens on pages with which a group of four loses none
SAMPLING = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0)


INDEXER = dict(picks=9, index_heads=3, index_size=8)
METHODS = {
    "dense from pages": ((Dense(),), dict(decode="pages")),
    # whose keys are read on their pages: in one model, since a fault in any layer shows in the end
    "on pages": ((MoBA(block=4, picks=2), GatedDocuments(), Sinks(), Window(6)), {}),
    "states and dense": ((GatedDelta(), Dense()), {}),
    # values are longer than keys
    "latent": ((MLA(12, None, 6, 20), DSA(12, None, 6, 20, **INDEXER)), {}),
    # of the last layer prefill needs only the keys, so that NSA comes first
    "nsa and dense": ((NSA(block=8, length=4, stride=4, picks=3, window=8), Dense()), dict(page=8)),
}
# Those without a state, which can neither have documents nor take guesses back.
STATELESS = [name for name in METHODS if not any(method.keeps_state for method in METHODS[name][0])]


def model_with(attention, **changes) -> ModelConfig:
    """MODEL with these methods, and at least as many layers."""
    layers = max(MODEL.num_layers, len(attention))
    return dataclasses.replace(MODEL, attention=attention, num_layers=layers, **changes)


class Letters:
    """A tokenizer of one character per token."""

    def decode(self, tokens):
        return "".join(chr(65 + token) for token in tokens)

    def token_id(self, text):
        return STOP


class Protocol:
    """Ends a message at the stop token or, where ``rule`` is set, at the first token 7."""

    stop_tokens = ("stop",)

    def __init__(self, rule=False):
        self.rule = rule

    def stopped(self, text):
        return self.rule and chr(65 + 7) in text


class Episode(SampledEpisode):
    """Answers every message with its own tokens turned around; over after ``turns`` messages."""

    def __init__(self, task, group, index, turns=3, protocol=None, wait=None):
        super().__init__(task, group, index)
        self.turns = turns
        self.protocol = protocol or Protocol()
        self.tokens = []
        self.sampled = []
        self.logprobs = []
        self.versions = []
        self.messages = 0
        self.wait, self.closed = wait, False

    @property
    def budget(self):
        return min(7, 60 - len(self.tokens))

    def start(self):
        self.tokens = list(self.task.prompt)
        self.sampled, self.logprobs = [False] * len(self.tokens), [0.0] * len(self.tokens)
        return list(self.tokens)

    def step(self, tokens, logprobs, versions):
        if self.wait is not None:
            self.wait()
        assert 0 < len(tokens) <= self.budget
        assert STOP not in tokens[:-1]
        self._add(tokens, logprobs, True)
        self.versions += versions
        self.messages += 1
        if self.messages == self.turns:
            return None
        answer = [STOP, *reversed(tokens)]
        self._add(answer, [0.0] * len(answer), False)
        return answer

    def _add(self, tokens, logprobs, sampled):
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampled += [sampled] * len(tokens)

    def finish(self):
        context = Context(
            tokens=np.array(self.tokens, np.int32),
            sampled=np.array(self.sampled, bool),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.all_versions, np.int32),
        )
        return Trajectory(
            task_id=self.task.id,
            group=self.group,
            index=self.index,
            contexts=(context,),
            prompt_length=len(self.task.prompt),
            turns=(),
            status="turn_limit",
            reward=Reward(0.0, {}),
        )

    def share(self, length):
        assert length == len(self.task.prompt)

    def close(self):
        self.closed = True

    @property
    def all_versions(self):
        given = iter(self.versions)
        return [next(given) if sampled else -1 for sampled in self.sampled]


def task_of(seed: int):
    prompt = np.random.default_rng(seed).integers(1, VOCAB, 3 + seed % 9)
    return types.SimpleNamespace(id=f"task{seed}", prompt=prompt.tolist())


def model_on(mesh, config=MODEL) -> Transformer:
    return jax.device_put(initial(config), parameter_shardings(initial(config), mesh))


@functools.cache
def initial(config) -> Transformer:
    """Larger weights than at initialisation, so that the distribution depends on the context.

    NSA's compressed keys stay small. Otherwise one stretch gets all of a query's probability, the
    two blocks that it lies in tie, and rounding decides which of them is chosen.
    """

    def scaled(path, x):
        return (0.1 if "compressed_k" in jax.tree_util.keystr(path) else 3.0) * x

    return jax.tree.map_with_path(scaled, Transformer(config, nnx.Rngs(0)))


def make_scheduler(engine=ENGINE, model=MODEL, shards=1, timeout_s=30.0, gather_s=0.0) -> Scheduler:
    """A scheduler that hands out the pages of ``engine``; its cache may have more."""
    pages = max(engine.pages, MOST_PAGES[engine.longest_document is not None])
    made = engine_of(model, dataclasses.replace(engine, pages=pages), shards)
    settings = dict(workers=4, worker_deadline_s=timeout_s, gather_s=gather_s)
    scheduler = Scheduler(made, Letters(), **settings)
    if engine.pages < pages:
        hand_out(scheduler, engine.pages)
    return scheduler


def hand_out(scheduler: Scheduler, pages: int) -> None:
    """Leaves so many pages of each shard of a new scheduler, whose programs stay as they are."""
    pool = scheduler._pool
    pool._shards = [PageAllocator(pages, allocator.page_size) for allocator in pool._shards]
    for allocator in pool._shards:
        allocator.dropped = None if pool._host is None else []
    pool._documents = [DocumentPool(*numbered) for numbered in enumerate(pool._shards)]


@functools.cache
def engine_of(model, engine, shards=1) -> Engine:
    """One for all tests, which holds no arrays but has its programs compiled."""
    return Engine(model, engine, SAMPLING, (STOP,), make_mesh(MeshConfig(data=shards, tensor=1)))


def play(
    tasks,
    *,
    group_size=4,
    shards=1,
    make=Episode,
    engine=ENGINE,
    model=MODEL,
    scheduler=None,
    **options,
):
    """(groups, statistics) of a scheduler, or of one of its own; options: of its rollout."""
    own = scheduler or make_scheduler(engine, model, shards)
    try:
        weights = model_on(own.engine.mesh, model)
        return own.rollout(
            weights, tasks, make, group_size=group_size, version=1, key=jax.random.key(7), **options
        )
    finally:
        if scheduler is None:
            own.close()


def play_together_and_alone(tasks, **options):
    """Groups that lose pages to each other, each of which has the bits that it has alone, with all
    pages of the same engine for itself.
    """
    together, stats = play(tasks, **options)
    assert stats.preempted
    for number, group in enumerate(together):
        alone, stats = play([group.task], first_group=number, **options)
        assert not stats.preempted
        assert_same(alone, [group])
    return together


def assert_same(these, those):
    for a, b in zip(these, those, strict=True):
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            assert (x.tokens == y.tokens).all() and (x.logprobs == y.logprobs).all()


def assert_near(these, those):
    """The same tokens, and log-probabilities that may differ in their last bits."""
    for a, b in zip(these, those, strict=True):
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            assert x.tokens.tolist() == y.tokens.tolist()
            np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=1e-5)


def assert_trained_alike(trajectories, config, model=None):
    model = model or model_on(make_mesh(MeshConfig(data=1, tensor=1)), config)
    for row, t in zip(trainer_logprobs(trajectories, model), trajectories, strict=True):
        predicted = row[np.arange(len(t.tokens) - 1), t.tokens[1:]]
        np.testing.assert_allclose(
            t.logprobs[1:][t.sampled[1:]], predicted[t.sampled[1:]], rtol=1e-3, atol=1e-4
        )


def trainer_logprobs(trajectories, model):
    """[trajectories, length, V] as whole rows compute them."""
    rows = -(-len(trajectories) // 12) * 12  # few shapes, since each is compiled
    tokens = np.zeros((rows, ENGINE.length), np.int32)
    for row, t in zip(tokens, trajectories, strict=False):
        row[: len(t.tokens)] = t.tokens
    return np.asarray(_trainer(model, tokens))[: len(trajectories)]


@jax.jit
def _trainer(model, tokens):
    ones = jnp.ones_like(tokens)
    positions = jnp.cumsum(ones, axis=1) - 1
    where = packed_rows(ones, 0 * ones, positions)
    hidden = model.hidden(tokens, positions, where, align=0)
    return jax.nn.log_softmax(model.logits(hidden))


def assert_all_free(scheduler):
    for pool in (scheduler._pool, scheduler._prompt_pool):
        for allocator in pool._shards:
            allocator.check()
            assert allocator.free == allocator.num_pages
