"""What a scheduler counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RolloutStats:
    """Counts since they were last taken; seconds are wall-clock."""

    sampled_tokens: int = 0
    # Real ones, without padding.
    prefilled_tokens: int = 0
    # Tokens of context before every message. Of these were in the cache: prompts, from another
    # group; prompts, from the group's first episode; an episode's own, from before.
    needed_tokens: int = 0
    found_in_tasks: int = 0
    found_in_groups: int = 0
    found_in_turns: int = 0
    # From dispatch to result; prefills on devices of their own are not waited for.
    decode_s: float = 0.0
    prefill_s: float = 0.0
    # Nothing could decode and a tool was waited for.
    wait_s: float = 0.0
    total_s: float = 0.0
    # Slots times decoding steps that were run, and those in which a row gained a token.
    slot_steps: int = 0
    row_steps: int = 0
    # Episodes that gave up their pages.
    preempted: int = 0
    # The most that the pages in use had at once.
    kv_bytes: int = 0

    @property
    def occupancy(self) -> float:
        """Mean share of the slots that gained a token in a decoding step."""
        return self.row_steps / max(1, self.slot_steps)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the context tokens that were found in the cache."""
        found = self.found_in_tasks + self.found_in_groups + self.found_in_turns
        return found / max(1, self.needed_tokens)
