"""Loss of tokens that a demonstrator chose, in a group of which all others are the policy's own.

As in LUFFY (2504.14945): one trajectory of a group is a demonstration, it takes part in the group's
statistics, and its tokens are off-policy data. The demonstrator is taken to be sure of each of its
tokens, so the ratio of the policies is pi itself, the probability that the policy gives the token.
The loss of a token is -A f(pi). The gradient of f(pi) is f'(pi) pi times that of log pi:

  importance   f = pi             importance sampling: a token that the policy would never choose
                                  has almost no gradient
  shaped       f = pi / (pi + g)  the paper's policy shaping: the gradient is greatest at pi = g
  imitated     f = log pi         supervised learning, weighted by the advantage

There is no clip, as there. Departures: demonstrations have no part in the divergence from a
reference and in the entropy, which are expectations over what the policy samples; nor in the
mismatch of sampler and trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from rl_code.learner.losses import Tokens

# f of log pi, which is at most 0, and of g.
WEIGHTS: dict[str, Callable[[Tokens, float], Tokens]] = {
    "importance": lambda logp, g: jnp.exp(logp),
    "shaped": lambda logp, g: jnp.exp(logp) / (jnp.exp(logp) + g),
    "imitated": lambda logp, g: logp,
}
