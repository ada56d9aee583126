"""Text that a reward model reads of an episode: the task, perhaps the reference, and the change.

A model with sight of the ground truth also reads the change of the task's reference. Nothing of the
trajectory is read: all that the agent says about its work would be advertising.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from models.tokenizer import Tokenizer
from rl_code.config.read_config import at_least
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.rewards.differing import reference_diff
from rl_code.rewards.judging import cut, texts_of
from rl_code.types import Task

# The most characters of a change that are kept for each token that may be read of it.
_CHARACTERS = 8


@dataclasses.dataclass(frozen=True)
class Reading:
    """Parts that a reward model reads, and their length."""

    # Tokens that are read at most. The work gets at least half of them.
    tokens: int = 512
    # Whether it reads the change of the task's reference, too: a model with sight of the truth.
    sees_reference: bool = False

    def __post_init__(self) -> None:
        at_least(self, tokens=8)

    def kept(self, change: str) -> str:
        """The part of a change that can be read, and is worth keeping on record."""
        return cut(change, _CHARACTERS * self.tokens)

    def ids(
        self, tokenizer: Tokenizer, task: Task, work: str, sandboxes: SandboxPool | None
    ) -> list[int]:
        """Token ids of a task and the change of its work, with an end-of-text token last.

        work: as ``kept`` returns it. sandboxes: as of ``reference_diff``. Raises SandboxFault.
        """
        reference = ""
        if self.sees_reference:
            reference = self.kept(reference_diff(task, sandboxes) or "")
        texts = {"Task": texts_of(task.messages), "Reference": reference, "Work": work}
        if not self.sees_reference:
            del texts["Reference"]
        # texts of others hold no special tokens
        parts = [
            tokenizer.encode(tokenizer.marks.quote(f"{name}:\n{text}\n"))
            for name, text in texts.items()
        ]
        *before, last = fitted([len(part) for part in parts], self.tokens - 1)
        lengths = [*before, last]
        read = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return [*(token for part in read for token in part), tokenizer.eos_id]


def fitted(lengths: Sequence[int], most: int) -> list[int]:
    """Lengths to which parts are cut so that together they have at most ``most`` tokens.

    The last part gets what the others leave, and at least half of all. Of the rest the same holds
    for the part before it, and so on.
    """
    found: list[int] = []
    left = most
    for number in range(len(lengths) - 1, -1, -1):
        others = sum(lengths[:number])
        share = left if number == 0 else max(left - left // 2, left - others)
        found.append(min(lengths[number], share))
        left -= found[-1]
    return found[::-1]
