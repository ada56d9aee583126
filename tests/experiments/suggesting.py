"""Episodes of one suggestion, without any sandbox."""

from __future__ import annotations

from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.tools.api import find_tools
from rl_code.rewards.combine import RewardConfig, SignalConfig, find_reward
from rl_code.types import Limits, Task, Trajectory

LIMITS = Limits(turns=1, tokens=1024, turn_tokens=64, test_runs=0, command_s=5.0)


def suggest(text: str, task: Task, asked: Named, tokenizer: Tokenizer, index: int) -> Trajectory:
    """A whole episode that suggests a text, paid by the signal ``asked``."""
    reward = find_reward(RewardConfig((SignalConfig(asked, label="asked"),)))
    one = Episode(
        task, group=0, index=index, protocol=Infill(), tools=find_tools([Named("suggest")]),
        tokenizer=tokenizer, pool=None, limits=LIMITS, reward=reward,
    )  # fmt: skip
    one.start()
    tokens = [*tokenizer.encode(text), tokenizer.token_id("<|eot|>")]
    assert one.step(tokens, [-0.5] * len(tokens), [0] * len(tokens)) is None
    return one.finish()
