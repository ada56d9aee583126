"""Interface of an agent of others: a program that asks a model for messages, and acts on them.

A harness starts one for each episode. It asks through the endpoint (``people.serving``), which
samples and records. Its commands run in the episode's sandbox: it sends them to ``/v1/execute``.
Such a program runs beside the sandbox, on this machine, so it must be one that you trust; what the
model says reaches no shell but the sandbox's. Others run inside (``Agent.sandbox``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rl_code.environment.sandbox.pool import Sandbox
from rl_code.harness.command_chat import CommandChat
from rl_code.types import Limits, Task


class HarnessError(RuntimeError):
    """An agent's program cannot be run: not there, or it ends before it asks for anything."""


@dataclasses.dataclass(frozen=True)
class EpisodeFacts:
    """Facts that an agent's program gets to know of an episode."""

    task: Task
    # Base URL of the API, with the key in it, and the same key for programs that want one.
    base_url: str
    api_key: str
    # The name of the model that it asks for.
    model: str
    limits: Limits
    # Opens the episode's sandbox, for programs that run inside. May raise SandboxFault.
    sandbox: Callable[[], Sandbox]

    @property
    def text(self) -> str:
        """The task in words."""
        return text_of(self.task)


def text_of(task: Task) -> str:
    """A task in words: its messages one after another."""
    return "\n\n".join(str(message["content"]) for message in task.messages)


@dataclasses.dataclass(frozen=True)
class Ending:
    """End of an agent's program."""

    # Whether it says that its work is done. Only then the files are graded.
    handed_in: bool
    # Why it ended otherwise, in words; "" where it handed in.
    cause: str = ""
    # Whether it ended through no fault of the model's. Such an episode is masked from training.
    fault: bool = False
    # What the program says that its work is worth, by name, "reward" among them; None where the
    # tests of the task say it.
    scores: Mapping[str, float] | None = None
    # Whether the program counts its work as a solution, where it says what that is worth.
    solved: bool = False


class Host:
    """Runs the programs of one agent. May be used from several threads."""

    def start(self, job: EpisodeFacts, on_end: Callable[[Ending], None]) -> Callable[[], None]:
        """Starts a program, and returns what ends it at once, in whatever state it is; that may be
        called late or twice.

        on_end: called once, from any thread, when the program has ended by itself. Raises
        HarnessError.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends all programs."""


class Agent:
    """One agent. A frozen dataclass: its fields are the settings that a config gives.

    An agent of one's own is such a class anywhere on Python's path, which a config names as
    ``package.module:object``.
    """

    # Whether its programs say themselves what their work is worth (``Ending.scores``). One whose
    # episode has reached a limit is then refused further messages, and may still say it.
    scores: ClassVar[bool] = False

    @property
    def sandbox(self) -> Mapping[str, Any] | None:
        """Settings of the sandboxes that its programs run inside of, as those of a config; None for
        programs that run beside.
        """
        return None

    def host(self) -> Host:
        """The runner of its programs, for one run. Raises HarnessError where that cannot be."""
        raise NotImplementedError

    @property
    def chat(self) -> CommandChat | None:
        """Form of its conversations, for demonstrations; None where that is not known."""
        return None
