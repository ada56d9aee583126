"""The engine alone: the same requests, without HTTP, without a record, without threads."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Sequence

from people.serving.service import TASK, Served
from rl_code.environment.protocols.protocol import Protocol
from rl_code.rollout.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields that ``service.Served`` reads of a request."""

    max_tokens: int
    stop: tuple[str, ...] = ()


class Counted:
    """A request that counts its tokens and nothing else."""

    adapter = -1

    def __init__(self, prompt: list[int], max_tokens: int, done: Callable[[int], None]):
        self.request = Fields(max_tokens)
        self.prompts = [prompt]
        self._done = done

    def sampled(self, index: int, tokens: Sequence[int]) -> None:
        """As ``service.EngineRequest``."""

    def answered(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        self._done(len(tokens))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Answers of a period."""

    # Tokens of the answers that ended, and those of all, which were cut off or ended.
    whole: int
    all: int
    seconds: float


class Bare:
    """A scheduler with weights, that has always as many requests as there are clients."""

    def __init__(
        self, scheduler: Scheduler, protocol: Protocol, prompts: Sequence[list[int]], clients: int
    ):
        self._scheduler, self._protocol = scheduler, protocol
        self._prompts = itertools.cycle(prompts)
        self._clients = clients

    def run(self, seconds: float, max_tokens: int) -> Sampled:
        """Answers sampled within so many seconds; unfinished ones are cut off then."""
        tokens = 0

        def done(count: int) -> None:
            nonlocal tokens
            tokens += count

        scheduler = self._scheduler
        tags = itertools.count()
        open_tags: set[int] = set()
        begin = time.monotonic()
        while (taken_s := time.monotonic() - begin) < seconds:
            while len(open_tags) < self._clients:
                tag = next(tags)
                job = Counted(next(self._prompts), max_tokens, done)
                self._submit(job, tag)
                open_tags.add(tag)
            for tag, _ in scheduler.step():
                open_tags.remove(tag)
        cut_off = [row for tag in open_tags for row in scheduler.give_up(tag)]
        return Sampled(tokens, tokens + sum(len(row.message) for row in cut_off), taken_s)

    def _submit(self, job: Counted, tag: int) -> None:
        length = self._scheduler.engine.config.length
        self._scheduler.submit(
            TASK,
            lambda task, group, index: Served(job, index, self._protocol, length),
            group=0,
            group_size=1,
            key=(secrets.randbits(32), secrets.randbits(32)),
            tag=tag,
        )
