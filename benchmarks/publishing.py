"""Times the way of weights from a learner to an actor over storage: a full version, one that is a
change of it, and reading both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks import model as bench_model
from models.model_config import ModelConfig
from models.transformer import parameter_count
from rl_code.weights.layout import sampling_model
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import TransferStats, WeightsConfig

# Steps of a learning rate that most updates change no bit of bfloat16 with.
_STEP = 1e-5
_DEADLINE_S = 300.0


def measure(config: ModelConfig, folder: Path, seed: int) -> Iterator[dict]:
    """A line for each version that is written and for each that is read.

    config: of parameters in float32, which actors have in its dtype. folder: of the versions; an
    empty one.
    """
    mesh = bench_model.all_devices()
    with jax.set_mesh(mesh):
        model = bench_model.random_model(config, mesh, seed)
        settings = WeightsConfig(full_every=1000, keep=2, deadline_s=_DEADLINE_S)
        publisher = StoredPublisher(folder, config.dtype, settings)
        abstract = sampling_model(config, config.dtype, mesh)
        actor = StoredSubscriber(folder, abstract, name="actor")
        with contextlib.closing(publisher):
            for number in (0, 1):
                begin = time.perf_counter()
                publisher.publish(number, model)
                held_up = time.perf_counter() - begin
                _, loaded = actor.wait(exactly=number, deadline_s=_DEADLINE_S)
                jax.block_until_ready(loaded)
                there = time.perf_counter() - begin
                found = actor.fetched or TransferStats("fetch", number)
                yield dict(
                    version="full" if number == 0 else "delta",
                    parameters=parameter_count(config),
                    learner_held_up_s=round(held_up, 3),
                    read_s=round(found.seconds, 3),
                    from_publish_to_loaded_s=round(there, 3),
                    gb=round((found.full_bytes + found.delta_bytes) / 1e9, 3),
                )
                model = jax.jit(_stepped, donate_argnums=0)(model)


def _stepped(model):
    """A model after a step in which every parameter moves as far as AdamW moves it."""
    return jax.tree.map(lambda x: x - _STEP * jax.numpy.sign(x), model)
