"""A small reward model on disk, with random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from flax import nnx

from models.scalar_head import ScoredTransformer, with_head
from models.sharding import MeshConfig, make_mesh
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.environment.protocols.compact import Compact
from rl_code.rewards import reward_model_folder
from rl_code.rewards.reading import Reading
from rl_code.rewards.reward_model_folder import Description, Weights
from rl_code.run import origin
from rl_code.run.origin import Origin
from tests.models.small import narrow_preset

READING = Reading(tokens=64)
TEXTS = ["Task:\nadd one\nWork:\nfile a.py\n@ line 1\n+x = 1\nReference:\n"] * 4


def make_tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300, Compact.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>")


def random_model(vocabulary: int, seed: int = 0) -> ScoredTransformer:
    """A narrow model with a random head."""
    shape = dataclasses.replace(narrow_preset(), vocab_size=vocabulary)
    model = with_head(Transformer(shape, nnx.Rngs(seed)))
    model.head.weight[...] = jax.random.normal(jax.random.key(seed), (shape.embed_dim,))
    return model


def make_folder(
    folder: Path,
    reading: Reading = READING,
    seeds: tuple[int, ...] = (0,),
    scale: tuple[float, float] = (1.0, 0.0),
) -> Path:
    """A folder as ``launch.reward_model`` makes it, with a version for each seed."""
    tokenizer = make_tokenizer()
    shape = random_model(tokenizer.vocab_size).config
    origin.keep(
        folder,
        Origin(),
        shape,
        tokenizer,
        max_positions=reading.tokens,
        stop_ids=[tokenizer.eos_id],
        chat_template=None,
    )
    attention = reward_model_folder.names_of(shape.attention, "attention")
    reward_model_folder.write(folder, Description(reading, attention, "outcomes"))
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    with Checkpoints(folder, {}, keep=9) as checkpoints, jax.set_mesh(mesh):
        for version, seed in enumerate(seeds):
            weights = Weights(random_model(tokenizer.vocab_size, seed), scale, f"seed {seed}")
            reward_model_folder.save(checkpoints, version, weights)
    return folder
