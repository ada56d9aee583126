"""Episodes without real tasks, for benchmarks: prompts are random tokens, messages have a fixed
length, and tools only wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.types import Context, Group, Reward, Task, Tests, Trajectory, Turn

# No token has this id, so no token ends a message.
STOP_IDS = (-1,)


class Letters:
    """A tokenizer that decodes everything to empty text; the benchmarks look at tokens only."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Empty text."""
        return ""

    def token_id(self, text: str) -> int:
        """An id that no token has."""
        return STOP_IDS[0]


class NoProtocol:
    """A protocol in which messages end by their length only."""

    stop_tokens = ("",)

    def stopped(self, text: str) -> bool:
        """False: no text ends a message."""
        return False


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[Task]:
    """Tasks whose prompts are ``length`` random tokens, kept in ``Task.meta``."""
    rng = np.random.default_rng(seed)
    none = Tests()
    return [
        Task(f"random/{seed}/{i}", (), {}, "", "", none, none, {}, meta={"tokens": row.tolist()})
        for i, row in enumerate(rng.integers(0, vocab_size, (count, length)))
    ]


class FixedEpisode(SampledEpisode):
    """An episode of ``turns`` messages with ``message`` tokens each.

    Its reward is the share of sampled tokens with an even id.

    answer: tokens of the tool's result after each message but the last.
    tool_s: gives the seconds that a tool takes, from (group, index, number of the message). None
      for no wait.
    """

    protocol = NoProtocol()

    def __init__(
        self,
        task: Task,
        group: int,
        index: int,
        *,
        message: int,
        turns: int = 1,
        answer: int = 4,
        tool_s: Callable[[int, int, int], float] | None = None,
    ):
        super().__init__(task, group, index)
        self._message, self._turns, self._answer, self._tool_s = message, turns, answer, tool_s
        self._tokens = []
        self._sampled = []
        self._logprobs = []
        self._versions = []
        self._messages, self._waited = 0, 0.0

    @property
    def budget(self) -> int:
        """Tokens of the next message."""
        return self._message

    def start(self) -> list[int]:
        """The token ids of the prompt."""
        self._add(self.task.meta["tokens"], False)
        return list(self.task.meta["tokens"])

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> list[int] | None:
        """Takes a message and waits as long as the tool takes.

        Returns the tool's result, or None after the last message.
        """
        self._add(tokens, True, logprobs, versions)
        if self._tool_s is not None:
            seconds = self._tool_s(self.group, self.index, self._messages)
            time.sleep(seconds)
            self._waited += seconds
        self._messages += 1
        if self._messages == self._turns:
            return None
        answer = [1] * self._answer
        self._add(answer, False)
        return answer

    def finish(self) -> Trajectory:
        """The record of the episode."""
        sampled = np.array(self._sampled, bool)
        tokens = np.array(self._tokens, np.int32)
        even = float(np.mean(tokens[sampled] % 2 == 0))
        prompt = len(self.task.meta["tokens"])
        return Trajectory(
            task_id=self.task.id,
            group=self.group,
            index=self.index,
            contexts=(
                Context(
                    tokens=tokens,
                    sampled=sampled,
                    logprobs=np.array(self._logprobs, np.float32),
                    versions=np.array(self._versions, np.int32),
                ),
            ),
            prompt_length=prompt,
            turns=(Turn("prompt", 0, prompt, ""), Turn("assistant", prompt, len(tokens), "")),
            status="submitted",
            reward=Reward(even, {"even": even}),
            seconds={"tools": self._waited},
        )

    def _add(self, tokens, sampled: bool, logprobs=None, versions=None) -> None:
        self._tokens += tokens
        self._sampled += [sampled] * len(tokens)
        self._logprobs += logprobs or [0.0] * len(tokens)
        self._versions += versions or [-1] * len(tokens)


def random_groups(
    count: int, samples: int, prompt: int, completion: int, vocab_size: int, seed: int
) -> list[Group]:
    """Groups of ``samples`` trajectories with random tokens behind a random prompt each."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, task in enumerate(prompts(count, prompt, vocab_size, seed)):
        episodes = [
            FixedEpisode(task, number, index, message=completion) for index in range(samples)
        ]
        for episode in episodes:
            episode.start()
            logprobs = [-float(np.log(vocab_size))] * completion
            tokens = rng.integers(0, vocab_size, completion).tolist()
            episode.step(tokens, logprobs, [0] * completion)
        groups.append(Group(task, tuple(episode.finish() for episode in episodes)))
    return groups
