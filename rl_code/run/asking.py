"""Asks a run's policy for the next token of a text, outside of any episode.

A signal may have the policy judge its own work. It is asked in the worker thread that grades the
episode, by one forward pass of a fixed shape for each text. So the answer is a function of weights
and text: an episode that is sampled again is judged the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.sharding import row_shards
from models.tokenizer import Tokenizer
from models.unstacked import Unstacked
from pallas_kernels.tokens import Tokens
from rl_code.config.read_config import ConfigError
from rl_code.rollout.playing import Playing
from rl_code.types import Trajectory


def ask(
    schedulers: Iterable[Playing],
    tokenizer: Tokenizer,
    mesh: Mesh,
    trajectory: Trajectory,
    texts: Sequence[str],
    most: int,
) -> list[str | None]:
    """The most likely next token of each text, by the weights that sampled the newest token of a
    trajectory; where these are gone, as while they change in flight, by those that are loaded. None
    for a text of more than ``most`` tokens. Special tokens in texts are plain text.

    Raises ConfigError where no weights are loaded.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"the policy cannot be asked by one of {jax.process_count()} processes that sample "
            "together; let a server judge"
        )
    loaded = [one for one in schedulers if one.weights is not None]
    newest = int(trajectory.versions.max(initial=-1))
    loaded.sort(key=lambda one: one.version == newest)
    if not loaded:
        raise ConfigError("no weights are loaded that could be asked; let a server judge")
    model = loaded[-1].weights
    assert model is not None
    align = model.config.alignment
    shape = row_shards(mesh), -(-most // align) * align  # as many rows as the mesh cuts them into
    found: list[str | None] = []
    for text in texts:
        ids = tokenizer.encode(tokenizer.marks.quote(text))
        if not 0 < len(ids) <= most:
            found.append(None)
            continue
        rows = np.zeros(shape, np.int32)
        rows[:, : len(ids)] = ids
        with jax.set_mesh(mesh):
            token = _next(model, rows, np.int32(len(ids)))
        found.append(tokenizer.decode([int(token)]))
    return found


@jax.jit
def _next(model: Unstacked, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """The most likely token after the first ``count`` of each of equal rows; int32 scalar."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    none = jnp.zeros_like(tokens)
    real = (places < count).astype(jnp.int32)
    where = Tokens(segments=real, branches=none, documents=none, order=places)
    hidden = model.hidden(tokens, places, where, align=model.config.alignment)
    last = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1, axis=1)
    return jnp.argmax(model.logits(last)[0, 0]).astype(jnp.int32)
