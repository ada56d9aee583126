"""Groups of agents of others through the engine: what is recorded is what the engine was given, and
the trainer computes the same log-probabilities.
"""

from __future__ import annotations

import collections
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from pallas_kernels.tokens import packed_rows
from rl_code.harness.agent import HarnessError
from rl_code.harness.harness import Harness
from rl_code.harness.program import Program
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from tests.models.small import small_config
from tests.rl_code.harness.chats import LIMITS, agent_episode, chat_tokenizer, minimal
from tests.rl_code.rollout.small import model_on

PLAYED = dataclasses.replace(LIMITS, turns=4, tokens=504, turn_tokens=12)
MODEL = small_config(
    vocab_size=chat_tokenizer().vocab_size, embed_dim=32, mlp_dim=64, num_layers=2, norm_eps=1e-6
)
ENGINE = EngineConfig(
    slots=4,
    episodes=4,
    page=8,
    pages=256,
    prefill_rows=2,
    prefill_tokens=32,
    prompt_length=200,
    length=504,
    decode_steps=4,
    cache_dtype="float32",
    view_block=168,
    tile=4,
)


@pytest.fixture(scope="module")
def engine():
    stops = tuple(sorted(chat_tokenizer().token_id(t) for t in ("<|im_end|>", "<|endoftext|>")))
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    return Engine(MODEL, ENGINE, SamplingConfig(), stops, mesh)


@pytest.fixture
def rollout(engine, task, sandboxes):
    """Plays a group of an agent; returns its trajectories, and the tokens of each row before each
    dispatch.
    """
    harnesses = []

    def play(agent, group_size=3, limits=PLAYED):
        harness = Harness(agent)
        harnesses.append(harness)
        scheduler = Scheduler(engine, chat_tokenizer(), workers=4, worker_deadline_s=2000.0)
        seen = collections.defaultdict(set)

        def look(rows):
            for row in rows:
                # what stands in the cache, and what the next dispatch reads
                seen[row.episode.index].add(tuple(row.tokens))

        scheduler.before_dispatch = look
        try:
            ((group,), stats) = scheduler.rollout(
                model_on(engine.mesh, MODEL),
                [task],
                lambda task, number, index: agent_episode(
                    task, sandboxes, harness, index=index, limits=limits
                ),
                group_size=group_size,
                version=1,
                key=jax.random.key(5),
            )
        finally:
            scheduler.close()
        assert stats.sampled_tokens == sum(t.sampled.sum() for t in group.trajectories)
        return group, seen

    yield play
    for harness in harnesses:
        harness.close()


def assert_as_given(group, seen):
    """What the engine was given is a beginning of a context on record, for every dispatch."""
    for trajectory in group.trajectories:
        wholes = [trajectory.whole(at).tolist() for at in range(len(trajectory.contexts))]
        assert seen[trajectory.index]
        for tokens in seen[trajectory.index]:
            assert any(whole[: len(tokens)] == list(tokens) for whole in wholes)


@jax.jit
def trainer(model, tokens):
    ones = jnp.ones_like(tokens)
    positions = jnp.cumsum(ones, axis=1) - 1
    where = packed_rows(ones, 0 * ones, positions)
    return jax.nn.log_softmax(model.logits(model.hidden(tokens, positions, where, align=0)))


def assert_trained_alike(group, model):
    """The forward pass of training has the sampler's log-probabilities, to rounding."""
    for trajectory in group.trajectories:
        for index, context in enumerate(trajectory.contexts):
            whole = trajectory.whole(index)
            row = np.zeros((1, ENGINE.length), np.int32)
            row[0, : len(whole)] = whole
            places = context.kept + np.flatnonzero(context.sampled)
            predicted = np.asarray(trainer(model, row))[0][places - 1, whole[places]]
            recorded = context.logprobs[context.sampled]
            np.testing.assert_allclose(recorded, predicted, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("options", [("text",), ("text", "forgetful")])
def test_the_record_is_what_the_engine_was_given_and_what_training_computes(
    rollout, engine, options, monkeypatch
):
    tokenizer = chat_tokenizer()
    encode = type(tokenizer).encode
    tokenised = []

    def counted(self, text):
        tokens = encode(self, text)
        tokenised.append(len(tokens))
        return tokens

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    group, seen = rollout(minimal(*options))
    assert_as_given(group, seen)
    assert_trained_alike(group, model_on(engine.mesh, MODEL))
    # every token was either sampled or tokenised, once
    recorded = sum(int((~t.sampled).sum()) for t in group.trajectories)
    assert sum(tokenised) == recorded
    trees = [len(t.contexts) for t in group.trajectories]
    assert max(trees) > 1 if "forgetful" in options else max(trees) == 1
    assert all(t.status == "turn_limit" and t.sampled.any() for t in group.trajectories)


@pytest.mark.long
def test_episodes_that_begin_differently_share_what_they_have_in_common(rollout, engine):
    code = (
        "import os, sys, io; text = sys.stdin.read() + ' ' + os.environ['OPENAI_API_KEY']; "
        f"sys.stdin = io.StringIO(text); sys.argv = ['agent', 'text']; exec(open({minimal().command[1]!r}).read())"
    )
    group, seen = rollout(Program(command=(sys.executable, "-c", code)))
    lengths = {t.prompt_length for t in group.trajectories}
    assert len(lengths) == 1
    (length,) = lengths
    first = [t.contexts[0].tokens for t in group.trajectories]
    assert all((tokens[:length] == first[0][:length]).all() for tokens in first)
    assert all(t.turns[0].end > length for t in group.trajectories)
    assert_as_given(group, seen)
    assert_trained_alike(group, model_on(engine.mesh, MODEL))


def test_the_same_seed_samples_the_same_trajectories(rollout):
    once, _ = rollout(minimal("text", "forgetful"))
    again, _ = rollout(minimal("text", "forgetful"))
    for a, b in zip(once.trajectories, again.trajectories, strict=True):
        assert (a.tokens == b.tokens).all() and (a.logprobs == b.logprobs).all()


def test_a_program_that_fails_to_start_ends_the_rollout(rollout):
    with pytest.raises(HarnessError, match="cannot be started"):
        rollout(Program(command=("no_such_program",)))
