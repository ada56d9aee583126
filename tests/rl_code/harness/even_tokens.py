"""A reward that a random model soon earns more of: the share of its tokens with even ids."""

from __future__ import annotations

import numpy as np


def even_tokens(episode) -> float:
    """Of the tokens sampled in all contexts of an episode."""
    contexts = episode.trajectory.contexts
    sampled = np.concatenate([context.tokens[context.sampled] for context in contexts])
    return float(np.mean(sampled % 2 == 0))
