"""A reward that a random model soon earns more of, and seldom by chance: the share of its tokens
with every eighth id.
"""

from __future__ import annotations

import numpy as np


def eighth_tokens(episode) -> float:
    """Of the tokens sampled in all contexts of an episode."""
    contexts = episode.trajectory.contexts
    sampled = np.concatenate([context.tokens[context.sampled] for context in contexts])
    return float(np.mean(sampled % 8 == 0))
