"""The learner alone, on trajectories of your own: GRPO teaches a model to answer 3 + 4 with 7.

    python -m examples.learning

Each step samples one token 32 times behind a prompt, rewards the 7, and makes one update:
advantages within the group, a batch in which the prompt stands once, the clipped loss, AdamW.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.sampling import MODEL
from models.transformer import Transformer
from pallas_kernels.tokens import sequences
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.objective import LossConfig
from rl_code.learner.update import OptimizerConfig, init_state, make_update
from rl_code.types import Context, Group, Reward, Task, Trajectory

PROMPT, ANSWER, SAMPLES = [3, 30, 4, 31], 7, 32
PACK = PackConfig(rows=2, slots=64, targets=40)


@jax.jit
def log_probabilities(model, prompt):
    """float32 [V] of the token behind ``prompt`` int32 [1, T]."""
    tokens = sequences(jnp.array([prompt.shape[1]]), prompt.shape[1])
    hidden = model.hidden(prompt, tokens.order, tokens, align=0)
    return jax.nn.log_softmax(model.logits(hidden)[0, -1].astype(jnp.float32))


def trajectory(index: int, token: int, logprob: float, version: int) -> Trajectory:
    sampled = np.arange(len(PROMPT) + 1) == len(PROMPT)
    tokens = np.array([*PROMPT, token], np.int32)
    logprobs = np.where(sampled, logprob, 0).astype(np.float32)
    context = Context(tokens, sampled, logprobs, np.where(sampled, version, -1).astype(np.int32))
    reward = Reward(float(token == ANSWER), {})
    return Trajectory("sum", 0, index, (context,), len(PROMPT), (), "submitted", reward)


def main(steps: int = 30) -> list[float]:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    state = init_state(Transformer(MODEL, nnx.Rngs(0)), optimizer)
    update = make_update(LossConfig().for_staleness(0), optimizer, micro_batches=1)
    random = np.random.default_rng(0)
    chances = []
    for step in range(steps):
        logp = np.asarray(log_probabilities(state.model, jnp.array([PROMPT])), np.float64)
        tokens = random.choice(len(logp), SAMPLES, p=np.exp(logp) / np.exp(logp).sum())
        some = (trajectory(i, int(t), logp[t], step) for i, t in enumerate(tokens))
        groups = [Group(Task("sum", ()), tuple(some))]
        advantages = group_advantages(groups, ADVANTAGES["grpo"]())
        batch, _ = pack(groups, advantages, PACK, version=step)
        state, metrics = update(state, batch)
        chances.append(float(np.exp(logp[ANSWER])))
        print(
            f"step {step}: chance of 7 {chances[-1]:.3f}, loss {float(metrics['train/loss']):.4f}"
        )
    return chances


if __name__ == "__main__":
    main()
