"""Counters of a scheduler."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RolloutStats:
    """Counts since they were last taken; seconds are wall-clock."""

    sampled_tokens: int = 0
    # Tokens that were prefilled, without padding.
    prefilled_tokens: int = 0
    # Tokens that stood before a message, over all messages that were begun.
    needed_tokens: int = 0
    # Of these, tokens of prompts that another group had put into the cache.
    found_in_tasks: int = 0
    # Of these, tokens of prompts that the first episode of the same group had found or computed.
    found_in_groups: int = 0
    # Of these, an episode's own tokens, which were in the cache from its turns before.
    found_in_turns: int = 0
    # Documents that were put on contexts, once for the prompt of a group.
    documents: int = 0
    # Of these, documents that had been encoded by the same weights, or were being encoded; and
    # their tokens.
    documents_found: int = 0
    document_tokens_found: int = 0
    # Seconds from the dispatch to the result. Prefills on devices of their own are not waited for.
    decode_s: float = 0.0
    prefill_s: float = 0.0
    # Seconds in which nothing could decode, and a tool was waited for.
    wait_s: float = 0.0
    # Seconds in which few episodes could go on, and tools of others were waited for.
    gather_s: float = 0.0
    total_s: float = 0.0
    # Slots times the decoding steps that were run.
    slot_steps: int = 0
    # Of these, the ones in which a row gained a token, or several with drafts.
    row_steps: int = 0
    # Tokens that were guessed and checked, and those of them that were right.
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Times that a row or a prompt had to give up its pages to an older one.
    preempted: int = 0
    # Prompts that another process was asked to prefill, and those of them that were prefilled here
    # after all, since it did not.
    prompts_asked: int = 0
    prompts_by_itself: int = 0
    # Pages that came from it, the tokens whose keys they have, and bytes.
    received_pages: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    # Seconds in which nothing could decode, and pages were waited for.
    pages_wait_s: float = 0.0
    # Pages of prompts that went to the host's memory, those that came back from there, and the
    # tokens whose keys these have, which were not prefilled again.
    pages_to_host: int = 0
    pages_from_host: int = 0
    host_tokens: int = 0
    # Bytes of the most pages that were there at once.
    host_bytes: int = 0
    # Bytes of the most pages that were in use at once.
    kv_bytes: int = 0

    @property
    def occupancy(self) -> float:
        """Mean share of the slots that gained a token in a decoding step."""
        return self.row_steps / max(1, self.slot_steps)

    @property
    def draft_acceptance(self) -> float:
        """Share of the drafted tokens that were right."""
        return self.accepted_tokens / max(1, self.drafted_tokens)

    @property
    def tokens_per_row_step(self) -> float:
        """Mean number of tokens that a row gains in a decoding step; 1 without drafts."""
        return (self.row_steps + self.accepted_tokens) / max(1, self.row_steps)

    @property
    def asked_tokens(self) -> int:
        """Tokens of prompts and results of tools, over all episodes: what would be prefilled if
        nothing were shared between episodes.
        """
        return self.needed_tokens - self.found_in_turns

    @property
    def document_hit_rate(self) -> float:
        """Share of the documents that had not to be encoded."""
        return self.documents_found / max(1, self.documents)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the context tokens that were found in the cache."""
        found = self.found_in_tasks + self.found_in_groups + self.found_in_turns
        return found / max(1, self.needed_tokens)
