"""The engine alone: a model, a paged cache, and groups of samples that share their prompt's pages.

    python -m examples.sampling

A random model samples 2 prompts 4 times each. The same key gives the same tokens, whatever is
sampled beside them: the second rollout has one of the two prompts only.
"""

import types

import jax
from flax import nnx

from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.environment.transcript import Transcript
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.types import Reward, Trajectory

SIZES = dict(vocab_size=40, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=4, num_kv_heads=2)
MODEL = ModelConfig(**SIZES, head_dim=8, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True)
ENGINE = EngineConfig(
    slots=4, episodes=8, page=8, pages=64, prompt_length=16, length=64, cache_dtype="float32"
)
STOP = 0
ANY_TEXT = types.SimpleNamespace(stop_tokens=("stop",), stopped=lambda text: False)
TOKENIZER = types.SimpleNamespace(decode=str, token_id=lambda text: STOP)
PROMPTS = {"first": [5, 6, 7], "second": [6, 6, 7]}


class Answer(SampledEpisode):
    """An episode of one message of at most 16 tokens, without tools."""

    protocol, budget = ANY_TEXT, 16

    def start(self):
        self.said = Transcript(TOKENIZER, documents=None)
        prompt = PROMPTS[self.task.id]
        self.said.add_given("prompt", prompt, documents=None)
        return prompt

    def step(self, tokens, logprobs, versions):
        # it is over; tokens that are returned would be read before it goes on
        self.said.add_sampled(tokens, logprobs, versions, calls=())

    def finish(self):
        parts = (self.said.context(),), len(PROMPTS[self.task.id]), (), "submitted", Reward(0.0, {})
        return Trajectory(self.task.id, self.group, self.index, *parts)


def main() -> list[list[list[int]]]:
    model = Transformer(MODEL, nnx.Rngs(0))
    engine = Engine(MODEL, ENGINE, SamplingConfig(1.0, 0, 1.0), (STOP,), make_mesh(MeshConfig()))
    tasks = [types.SimpleNamespace(id=name) for name in PROMPTS]
    scheduler = Scheduler(engine, TOKENIZER, workers=2, worker_deadline_s=30.0)
    sampled = []
    for some in (tasks, tasks[:1]):
        way = dict(group_size=4, version=0, key=jax.random.key(0))
        groups, _ = scheduler.rollout(model, some, Answer, **way)
        for group in groups:
            sampled.append([t.tokens[t.sampled].tolist() for t in group.trajectories])
            print(group.task.id, *sampled[-1], sep="\n  ")
    scheduler.close()
    return sampled


if __name__ == "__main__":
    main()
