"""Builders of small trajectories, groups and models for the learner's tests."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.target_logprobs import Head
from models.transformer import LayerTerms, Transformer
from pallas_kernels.tokens import visible
from rl_code.learner import learner as learner_lib
from rl_code.types import Context, Group, Reward, Task, Tests, Trajectory
from tests import draws
from tests.models.small import small_config

VOCAB = 32


def make_trajectory(
    tokens, sampled, *, prompt_length, group=0, index=0, status="submitted", reward=0.0, version=0
):
    """A trajectory whose sampler log-probabilities are a fixed function of its tokens."""
    tokens = np.asarray(tokens, np.int32)
    sampled = np.asarray(sampled, bool)
    return Trajectory(
        task_id=f"task{group}",
        group=group,
        index=index,
        contexts=(
            Context(
                tokens=tokens,
                sampled=sampled,
                logprobs=np.where(sampled, -3.4 - 0.3 * np.sin(tokens), 0.0).astype(np.float32),
                versions=np.where(sampled, version, -1).astype(np.int32),
            ),
        ),
        prompt_length=prompt_length,
        turns=(),
        status=status,
        reward=Reward(reward, {}),
    )


def make_group(trajectories, number=0):
    task = Task(f"task{number}", (), {}, "main.py", "f", Tests(), Tests(), {})
    return Group(task, tuple(trajectories))


def make_groups(sizes, *, seed=0, prompt=(4, 8), completion=(5, 12), version=0):
    """Random groups: sampled spans with observations in between, a sampled last token, prompts
    shared.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for number, size in enumerate(sizes):
        shared = rng.integers(0, VOCAB, rng.integers(*prompt))
        members = []
        for index in range(size):
            length = rng.integers(*completion)
            tokens = np.concatenate([shared, rng.integers(0, VOCAB, length)])
            sampled = np.arange(len(tokens)) >= len(shared)
            sampled[len(shared) + 2 : len(shared) + 4] = False
            members.append(
                make_trajectory(
                    tokens,
                    sampled,
                    prompt_length=len(shared),
                    group=number,
                    index=index,
                    reward=float(rng.integers(0, 3)),
                    version=version,
                )
            )
        groups.append(make_group(members, number))
    return groups


def make_turns(sizes, *, seed=0, prompt=(20, 40)):
    """Random groups whose completions have one to three sampled spans with observations before,
    between and after.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for number, size in enumerate(sizes):
        shared = rng.integers(0, VOCAB, rng.integers(*prompt))
        members = []
        for index in range(size):
            # an observation of so many tokens, a sampled span, an observation, ...
            spans = [rng.integers(0, 3)]
            for _ in range(rng.integers(1, 4)):
                spans += [rng.integers(1, 7), rng.integers(0, 5)]
            sampled = np.concatenate(
                [np.zeros(len(shared), bool), np.repeat(np.arange(len(spans)) % 2 == 1, spans)]
            )
            tokens = np.concatenate([shared, rng.integers(0, VOCAB, len(sampled) - len(shared))])
            members.append(
                make_trajectory(
                    tokens, sampled, prompt_length=len(shared), group=number, index=index
                )
            )
        groups.append(make_group(members, number))
    return groups


METHODS = {
    "dense-window": (Dense(), Window(7)),
    "moba-documents": (MoBA(block=8, picks=2), GatedDocuments()),
    "nsa": (NSA(length=4, stride=2, block=8, picks=3, initial=1, local=1, window=10),),
}


def make_attending(name):
    """A small model of two layers with these methods and grouped queries."""
    return make_model(attention=METHODS[name], num_heads=4)


@functools.cache
def make_model(**changes):
    """A small model, the same for the same arguments; norms and biases are off their initial ones
    and zeros.
    """
    own = dict(vocab_size=VOCAB, mlp_dim=32, num_layers=2, num_heads=2, qkv_bias=True)
    config = small_config(**own | changes)

    # not as one program, of which every model would have its own
    with draws.fewer_programs():
        leaves, tree = jax.tree.flatten(Transformer(config, nnx.Rngs(0)))
    keys = jax.random.split(jax.random.key(1), 64)
    leaves = [
        np.asarray(x) + np.asarray(0.2, x.dtype) * draws.normal(keys[number], x.shape, x.dtype)
        for number, x in enumerate(leaves)
    ]
    # whatever mesh is set when it is first asked for
    return jax.device_put(jax.tree.unflatten(tree, leaves), jax.devices()[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Toy:
    """The least that has a model's methods: a position-dependent mean of what a slot sees. It
    compiles quickly.
    """

    table: jax.Array
    mix: jax.Array
    norm: jax.Array

    def prefill(self, tokens, positions, where, runs=0):
        return [
            self.table[tokens]
            * jnp.sin(positions[..., None] + jnp.arange(1.0, 9.0)).astype(self.table.dtype)
        ]

    def hidden(self, tokens, positions, where, runs=0, before=None, align=1, documents=False):
        (x,) = self.prefill(tokens, positions, where)
        earlier = before.keys if before else []
        keys = jnp.concatenate([*earlier, x], axis=1)
        mask = visible(
            where,
            jax.tree.map(
                lambda *x: jnp.concatenate(x, axis=1), *([before.tokens] if before else []), where
            ),
        )
        seen = jnp.einsum("BTS,BSD->BTD", mask, keys) / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        return self.norm * jnp.tanh((x + seen).astype(x.dtype) @ self.mix)

    def hidden_routed(self, *arguments, **named):
        return self.hidden(*arguments, **named), LayerTerms()

    def logits(self, hidden):
        return jnp.einsum("...D,VD->...V", hidden, self.table).astype(jnp.float32)

    def head(self):
        return Head(self.table, ("vocab", "embed"), VOCAB)


@functools.cache
def make_toy(dtype="float32"):
    """A toy model, the same every time."""
    rng = np.random.default_rng(0)
    return Toy(
        *(jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((VOCAB, 8), (8, 8), (8,)))
    )


@pytest.fixture(scope="session")
def build():
    """The builders above by short names."""
    return types.SimpleNamespace(
        vocab=VOCAB,
        trajectory=make_trajectory,
        group=make_group,
        groups=make_groups,
        turns=make_turns,
        model=make_model,
        attending=make_attending,
        toy=make_toy,
    )


@pytest.fixture
def shared_programs(monkeypatch):
    """Learners of equal configs have the same programs, and ``steps.update_for`` has them, too."""
    from tests.rl_code.learner.steps import MAKERS

    for name, make in MAKERS.items():
        monkeypatch.setattr(learner_lib, name, make)


@pytest.fixture(autouse=True)
def _exact_matmul():
    """Comparisons at 1e-5 need full float32 products on every backend."""
    with jax.default_matmul_precision("highest"):
        yield
