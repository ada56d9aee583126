"""The shapes of the engine, and what they must agree in."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rl_code.config.read_config import follows


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Shapes of the engine. Every number is per shard of rows: there is one shard for each device
    along the mesh axes ``data`` and ``fsdp``.

    In a run, fields that are None follow from the limits of an episode (``rl_code.run.derive``).
    """

    # The engine that samples for training: "own", this project's, or "vllm", a server of vLLM
    # (``rollout.vllm``). Of these shapes vLLM has slots, episodes, prompt_length and length;
    # decode_steps are the tokens after which a protocol's rule on text is looked at. The others are
    # of the engine that plays suites, which is always this project's.
    name: Literal["own", "vllm"] = "own"
    # Rows that are decoded together, one episode in each.
    slots: int = 32
    # The most episodes that are open at once: decoding, waiting for a tool, or pre-empted.
    episodes: int | None = None
    # Tokens of a page. In a run whose layers choose blocks a page is a block, whatever stands here.
    page: int = 32
    # Pages of the cache.
    pages: int | None = None
    # MiB that the pages may take. If ``pages`` would take more, there are fewer pages, and episodes
    # are pre-empted when they run out. None for no such limit.
    pages_mb: float | None = None
    # MiB of the host's memory for pages of prompts and documents that nobody holds any more and
    # whose place on the device is needed. They come back when a prompt with the same beginning is
    # played, or the document is read, instead of being prefilled again. Episodes that wait for a
    # tool then give their pages to older ones before others do. None for no such pages.
    host_pages_mb: float | None = None
    # Rows of one prefill.
    prefill_rows: int = 4
    # Tokens of each row of one prefill. A longer prompt takes several.
    prefill_tokens: int = 64
    # Tokens of the longest prompt.
    prompt_length: int | None = None
    # Tokens of the longest trajectory, prompt included.
    length: int | None = None
    # Decoding steps of one dispatch, in each of which a row samples a token (more with
    # ``draft_tokens``).
    decode_steps: int = 16
    # The dtype of keys and values in the cache.
    cache_dtype: str | None = None
    # Where dense layers read their keys while they decode. "pages": a kernel reads them on their
    # pages. "view": they are copied side by side once per dispatch, and rows that share a prefix
    # read it together. None for what suits the device.
    decode: Literal["pages", "view"] | None = None
    # With decode "view": tokens after the shared prefix are copied in blocks of this many. Blocks
    # that no row has reached cost nothing. A multiple of ``page``, to which a run
    # rounds it up.
    view_block: int = 128
    # With decode "view": the most rows that read a shared prefix together.
    tile: int = 8
    # Rows of one prefill of short results of tools, which would fill little of the usual shape; 0
    # if they have no shape of their own. With other shapes log-probabilities may differ in their
    # last bits, as with ``draft_tokens``.
    result_rows: int = 0
    # Tokens of each row of such a prefill; longer results use the usual shape. 0 with result_rows
    # 0.
    result_tokens: int = 0
    # Speculation: the most tokens of each row that are guessed in a decoding step and checked in
    # the same pass of the model; 0 for none. A step then gains up to so many tokens and one more,
    # and a dispatch up to ``decode_steps`` times as many. What is sampled never depends on the
    # guesses: tokens and log-probabilities have the same bits whatever is guessed. Compared with
    # draft_tokens=0 the program has other shapes, as with other ``slots``: log-probabilities may
    # differ in their last bits, and a token only if its random number is that near to the border
    # between two tokens.
    draft_tokens: int = 0
    # What guesses are copied from: "context", the episode's own tokens; "group", the other answers
    # of its group; "task", earlier answers to the same task.
    draft_sources: tuple[Literal["context", "group", "task"], ...] = ("context", "group", "task")
    # The most tokens of other answers that a row's guesses are copied from.
    draft_library: int = 1024
    # Tokens of a row are guessed only while it repeats itself: if of the last ``draft_window``
    # tokens of its message at least this share had followed the same two tokens before in the
    # episode. The other rows are decoded by a program without guesses. 0 to guess always.
    draft_least: float = 0.0
    # The tokens after which it is looked at again whether a row repeats itself. That depends on the
    # row's own tokens alone, so a trajectory that is sampled again meets the same programs.
    draft_window: int = 16
    # The most tokens of a document, from which the positions of the tokens outside of documents
    # count. None in a run without documents.
    longest_document: int | None = follows("documents.longest", None)
    # Whether it is noted which blocks layers of NSA, and which experts, are chosen for each sampled
    # token.
    note_picks: bool = follows("rollout.picks", False)

    def __post_init__(self):
        if self.prefill_rows < 2:
            raise ValueError(
                f"prefill_rows={self.prefill_rows} must be at least 2: a product with one row may "
                "round differently"
            )
        if (self.result_rows or self.result_tokens) and min(
            self.result_rows, self.result_tokens
        ) < 2:
            raise ValueError(
                f"result_rows={self.result_rows} and result_tokens={self.result_tokens} must be at "
                "least 2, or both 0"
            )
        if None not in (self.prompt_length, self.length) and not (
            1 <= self.prompt_length <= self.length
        ):
            raise ValueError(
                f"prompt_length={self.prompt_length} must be at least 1 and not exceed "
                f"length={self.length}"
            )
        if min(self.page, self.prefill_tokens) < 1:
            raise ValueError(
                f"page={self.page} and prefill_tokens={self.prefill_tokens} must be at least 1"
            )
        if None not in (self.pages, self.length) and (
            self.pages * self.page < self.length + self.page
        ):
            raise ValueError(
                f"pages={self.pages} of {self.page} tokens must hold length={self.length} tokens "
                "and one page more"
            )
        for name in ("pages_mb", "host_pages_mb"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.draft_tokens < 0 or self.draft_library < 0:
            raise ValueError(
                f"draft_tokens={self.draft_tokens} and draft_library={self.draft_library} must be "
                "at least 0"
            )
        if self.draft_tokens and not self.draft_sources:
            raise ValueError(
                f"draft_tokens={self.draft_tokens} needs draft_sources, some of context, group and "
                "task"
            )
        if not 0 <= self.draft_least <= 1 or self.draft_window < 1:
            raise ValueError(
                f"draft_least={self.draft_least} must be in [0, 1] and "
                f"draft_window={self.draft_window} at least 1"
            )
        if self.draft_least and not self.draft_tokens:
            raise ValueError(
                f"draft_least={self.draft_least} needs draft_tokens of at least 1: it says when "
                "tokens are guessed"
            )
        if self.view_block % self.page:
            raise ValueError(f"view_block={self.view_block} must be a multiple of page={self.page}")
        if min(self.slots, self.tile, self.decode_steps) < 1 or (
            self.episodes is not None and self.episodes < self.slots
        ):
            raise ValueError(
                f"slots={self.slots}, tile={self.tile} and decode_steps={self.decode_steps} must "
                "be at least 1, and "
                f"episodes={self.episodes} at least slots"
            )

    def within_memory(self, page_bytes: int) -> EngineConfig:
        """With as many pages as ``pages_mb`` allows, where those are fewer.

        page_bytes: of one page of all layers. Raises ValueError if one trajectory does not fit.
        """
        if self.pages_mb is None:
            return self
        pages = int(self.pages_mb * 2**20) // page_bytes
        if pages * self.page < self.length + self.page:
            raise ValueError(
                f"pages_mb={self.pages_mb} holds {pages} pages of {page_bytes / 2**20:.2f} MiB; a "
                f"trajectory of length={self.length} needs {self.table + 1}"
            )
        return dataclasses.replace(self, pages=min(self.pages, pages))

    @property
    def table(self) -> int:
        """Pages of the longest trajectory."""
        return -(-self.length // self.page)

    @property
    def dispatch_tokens(self) -> int:
        """The most tokens that a row samples in one dispatch."""
        return self.decode_steps * (1 + self.draft_tokens)

    def without_drafts(self) -> EngineConfig:
        """The shapes of a dispatch in which nothing is guessed."""
        return dataclasses.replace(self, draft_tokens=0, draft_least=0.0)

    @property
    def undone(self) -> int:
        """The most tokens whose keys are written and not kept: what a protocol's rule on text cuts
        off, and wrong guesses.
        """
        return self.dispatch_tokens

    @property
    def draft_room(self) -> int:
        """Places for other answers in the texts that guesses are copied from."""
        return self.draft_library if {"group", "task"} & {*self.draft_sources} else 0

    @property
    def prefix_table(self) -> int:
        """Pages of the longest shared prefix."""
        return max(1, (self.prompt_length - 1) // self.page)
