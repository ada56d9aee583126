"""The demonstrations of a run: those of its warm start and its tokenizer, and those in groups."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.tools.tool import Tool
from rl_code.harness.agent import Agent
from rl_code.rollout.demonstrator import Demonstrator
from rl_code.run.config import RunConfig
from rl_code.run.task_sets import TaskSets
from rl_code.tasks.demonstrations import DemonstrationConfig, Segment, demonstrate, walk_words
from rl_code.tasks.group_demonstrations import messages_of
from rl_code.types import Task


class DemonstrationSource:
    """Demonstrations by their numbers; the same for the same config.

    agent: the agent of others that plays the run's episodes; None for our own.
    """

    def __init__(
        self, config: RunConfig, tools: dict[str, Tool], agent: Agent | None, tasks: TaskSets
    ):
        self._config, self._tasks = config, tasks
        protocol = find_protocol(config.protocol, tools, "config.protocol")
        chat = agent.chat if agent else None
        self._words = walk_words(protocol, tools, config.documents, chat)

    def numbered(self, index: int) -> list[Segment]:
        """Demonstration ``index``."""
        return self._shown(self._tasks.demonstrated[index], str(index))

    def held_out(self, index: int) -> list[Segment]:
        """Demonstration of a task of the first suite. Raises ConfigError without one."""
        if not self._config.suites:
            wanted = self._config.sft.held_out if self._config.sft else 0
            raise ConfigError(
                f"config.sft.held_out = {wanted} demonstrates tasks of the first of config.suites, "
                "and there is none; add a suite, or set it to 0"
            )
        tasks = self._tasks.of_suite(self._config.suites[0])
        return self._shown(tasks[index % len(tasks)], f"held out/{index}")

    def demonstrator(
        self, tokenizer: Tokenizer, make_episode: Callable[[Task, int, int], Episode]
    ) -> Demonstrator | None:
        """Plays the demonstrations of groups; None where groups have none."""
        shown = self._config.train.demonstrations
        if shown is None:
            return None

        def messages(task: Task, rng: random.Random) -> list[list[int]]:
            limits, documents = self._config.limits, self._config.documents
            way = shown.demonstration, limits, documents, self._words
            texts = messages_of(demonstrate(task, rng, *way))
            return [tokenizer.encode(text) for text in texts]

        return Demonstrator(messages, make_episode, shown.steps)

    def _shown(self, task: Task, number: str) -> list[Segment]:
        rng = random.Random(f"demonstration/{self._config.seed}/{number}")
        # without a warm start they still are what a tokenizer is trained on
        kind = self._config.sft.demonstration if self._config.sft else DemonstrationConfig()
        limits, documents = self._config.limits, self._config.documents
        return demonstrate(task, rng, kind, limits, documents, self._words)
