"""Episodes of a dump as trajectories.

Where the dump has token ids, these are the tokens. Where it has texts alone, their tokens are those
that a named tokenizer gives, or the bytes of the text in UTF-8. Nobody sampled such tokens: none is
marked as sampled, and none has a log-probability.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models

from models import pretrained
from models.tokenizer import Tokenizer
from rl_code.foreign.dump import (
    NOT_RECORDED,
    SOLVED,
    Branch,
    DumpedGroup,
    DumpError,
    Episode,
    Span,
)
from rl_code.types import Context, Group, Reward, Task, Trajectory, Turn

# Tokens of one trajectory, and episodes of one group.
MOST_TOKENS = 1 << 24
MOST_EPISODES = 1 << 16


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are the bytes, with their values as ids, and one that ends texts."""
    # how byte-level BPE writes bytes: those that can be printed as they are, others from 256 on
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    letters = [chr(byte if byte in printed else next(others)) for byte in range(256)]
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, eos="<|end|>", pad="<|end|>")


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Makes tokens of texts, and texts of tokens."""

    tokenizer: Tokenizer
    # The folder that was named; None for bytes.
    folder: Path | None = None

    @classmethod
    def read(cls, folder: Path | None) -> Encoder:
        """The tokenizer of a folder; bytes without one. Raises DumpError."""
        if folder is None:
            return cls(byte_tokenizer())
        try:
            return cls(pretrained.read_tokenizer(folder), folder)
        except (OSError, ValueError) as error:
            raise DumpError(f"--tokenizer={folder}: {error}") from error

    @property
    def name(self) -> str:
        """Digest by which tokenizers are told apart."""
        if self.folder is None:
            return "bytes of the text"
        path = self.folder / "tokenizer.json" if self.folder.is_dir() else self.folder
        return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"

    def encode(self, text: str) -> np.ndarray:
        """int32 [T], tokens of a text."""
        if self.folder is None:
            data = text.encode("utf-8", "surrogatepass")
            return np.frombuffer(data, np.uint8).astype(np.int32)
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text
        return np.asarray(self.tokenizer.encode(text), np.int32)

    def check(self, episode: Episode) -> None:
        """Raises DumpError for ids that this tokenizer does not have."""
        if self.folder is None:
            raise DumpError(
                f"{episode.place}: it holds token ids; name the tokenizer of the run by "
                "--tokenizer=<folder>, or add --as_text to store the texts alone"
            )
        for branch in episode.branches:
            for span in branch.spans:
                if span.ids is not None and span.ids.max(initial=0) >= self.tokenizer.vocab_size:
                    raise DumpError(
                        f"{episode.place}: token id {span.ids.max()}; the tokenizer at "
                        f"{self.folder} has {self.tokenizer.vocab_size} tokens, so it is that of "
                        "another model"
                    )


def group_of(
    dumped: DumpedGroup, number: int, encoder: Encoder, solved_from: float | None, as_text: bool
) -> Group:
    """The group as our record has it.

    number: of the group in its step. solved_from: the least reward of an episode that solved its
    task; None where nobody says what that is. as_text: whether ids of the dump are left alone.
    Raises DumpError.
    """
    if len(dumped.episodes) > MOST_EPISODES:
        raise DumpError(
            f"{dumped.episodes[0].place}: a group of more than {MOST_EPISODES:,} episodes"
        )
    meta = dict(dumped.meta) | ({SOLVED: NOT_RECORDED} if solved_from is None else {})
    task = Task(dumped.task_id, dumped.messages, meta=meta)
    made = [
        _trajectory(task.id, number, index, episode, encoder, solved_from, as_text)
        for index, episode in enumerate(dumped.episodes)
    ]
    shared = _shared([(one.contexts[0].tokens, one.prompt_length) for one in made])
    return Group(task, tuple(dataclasses.replace(one, prompt_length=shared) for one in made))


def _shared(prompts: Sequence[tuple[np.ndarray, int]]) -> int:
    """Number of tokens at the start that all prompts have. prompts: tokens and their length."""
    first, length = prompts[0]
    for tokens, own in prompts[1:]:
        length = min(length, own)
        differing = np.flatnonzero(first[:length] != tokens[:length])
        length = int(differing[0]) if len(differing) else length
    return length


def _trajectory(
    task_id: str,
    group: int,
    index: int,
    episode: Episode,
    encoder: Encoder,
    solved_from: float | None,
    as_text: bool,
) -> Trajectory:
    with_ids = episode.has_ids and not as_text
    if with_ids:
        encoder.check(episode)
    contexts: list[Context] = []
    turns: list[Turn] = []
    wholes: list[list[int]] = []  # of each branch the lengths of the spans of its whole
    total = 0
    for number, branch in enumerate(episode.branches):
        kept = wholes[branch.parent][: branch.kept] if branch.parent >= 0 else []
        pieces = [_piece(span, encoder, with_ids, episode) for span in branch.spans]
        lengths = [len(piece.tokens) for piece in pieces]
        total += sum(lengths)
        if total > MOST_TOKENS:
            raise DumpError(f"{episode.place}: an episode of more than {MOST_TOKENS:,} tokens")
        wholes.append([*kept, *lengths])
        contexts.append(_context(branch, pieces, sum(kept)))
        turns += _turns(branch, lengths, number, encoder, with_ids)
    flags = list(episode.flags)
    reward = episode.reward
    if not math.isfinite(reward):
        # the page and the curves know finite numbers alone
        flags.append(f"reward {reward}")
        reward = 0.0
    finite = {name: x for name, x in episode.components.items() if math.isfinite(x)}
    flags += [f"{name} {x}" for name, x in episode.components.items() if name not in finite]
    return Trajectory(
        task_id,
        group,
        index,
        tuple(contexts),
        _prompt_length(episode.branches[0], wholes[0]),
        tuple(turns),
        episode.status,
        Reward(reward, finite, tuple(flags), {"dump": dict(episode.notes)}),
        solved=solved_from is not None and reward >= solved_from,
        scores=dict(episode.scores) or None,
    )


def _prompt_length(branch: Branch, lengths: Sequence[int]) -> int:
    """Tokens before the first span that is no prompt."""
    found = 0
    for span, length in zip(branch.spans, lengths, strict=True):
        if span.role != "prompt":
            break
        found += length
    return found


def _piece(span: Span, encoder: Encoder, with_ids: bool, episode: Episode) -> Context:
    """The tokens of a span."""
    if not with_ids:
        tokens = encoder.encode(span.text)
    else:
        tokens = np.zeros(0, np.int32) if span.ids is None else span.ids
    nothing = np.zeros(len(tokens), np.float32)
    sampled = span.sampled if with_ids and span.sampled is not None else nothing > 0
    version = -1 if episode.version is None else episode.version
    return Context(
        tokens,
        sampled,
        span.logprobs if with_ids and span.logprobs is not None else nothing,
        np.where(sampled, version, -1).astype(np.int32),
        trainer_logprobs=span.trainer_logprobs if with_ids else None,
    )


def _context(branch: Branch, pieces: Sequence[Context], kept: int) -> Context:
    """The tokens of a branch. kept: how many of its whole parent stand before them."""
    pieces = pieces or [_NOTHING]
    noted = [piece.trainer_logprobs is not None for piece in pieces]
    return Context(
        np.concatenate([piece.tokens for piece in pieces]),
        np.concatenate([piece.sampled for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.versions for piece in pieces]),
        branch.parent,
        kept,
        trainer_logprobs=np.concatenate(list(map(_noted, pieces))) if any(noted) else None,
    )


_NOTHING = Context(
    np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32), np.zeros(0, np.int32)
)


def _noted(piece: Context) -> np.ndarray:
    """The trainer's log-probabilities; of a span that it did not see NaN for sampled tokens."""
    if piece.trainer_logprobs is not None:
        return piece.trainer_logprobs
    return np.where(piece.sampled, np.nan, 0.0).astype(np.float32)


def _turns(
    branch: Branch, lengths: Sequence[int], number: int, encoder: Encoder, with_ids: bool
) -> list[Turn]:
    turns = []
    start = 0
    for span, length in zip(branch.spans, lengths, strict=True):
        text = span.text
        if with_ids and span.ids is not None and length:
            text = encoder.tokenizer.decode(span.ids.tolist())
        end = start + length
        turns.append(Turn(span.role, start, end, text, span.calls, span.results, number))
        start = end
    return turns
