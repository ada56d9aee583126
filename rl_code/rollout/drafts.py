"""Speculation: guesses at a row's next tokens, which the model checks several at a time.

The engine draws a token as a function of its logits and of its key and position. So a guess is
right exactly when it equals the draw, and what is sampled is what would have been sampled without
guesses. (Speculative sampling, 2211.17192, accepts a guess at random instead, since its draws are
not functions of a key.)

Guesses cost no model: they are copied from texts that the row may be about to repeat (prompt lookup
decoding, Saxena 2023). These are its own context, such as a file that it quotes; the other answers
of its group; and earlier answers to the same task.

Dimensions: B rows, S places of their texts, d drafts.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rl_code.rollout.engine_config import EngineConfig

if TYPE_CHECKING:
    from rl_code.rollout.rows import Row

# No token: what separates texts and fills the rest of an array.
NONE = -1
# Most of a row's last tokens that are compared with a text. Among places that agree in as many, the
# newest is taken.
_LONGEST = 8
# Tasks whose earlier answers are kept; those that were asked for longest ago are dropped.
_TASKS = 4096


def propose(
    texts: Int[Array, "B S"], ends: Int[Array, " B"], *, count: int, own: int, context: bool
) -> Int[Array, "B d"]:
    """Guesses at the next ``count`` tokens of every row: what followed when the row's last tokens
    stood in its texts before.

    texts: other texts, separated by NONE, and from place ``own`` on the row's own tokens. ends:
    [B], the place behind the row's last token. context: whether the row's own tokens are copied
    from, too. Returns NONE where there is no guess, and behind that too.
    """
    places = jnp.arange(texts.shape[1])
    # How many tokens up to each place equal the row's last ones.
    agree = jnp.zeros(texts.shape, jnp.int32)
    alive = jnp.ones(texts.shape, bool)
    for back in range(_LONGEST):
        at = ends - 1 - back
        token = jnp.take_along_axis(texts, jnp.maximum(at, own)[:, None], axis=1)
        token = jnp.where(at[:, None] >= own, token, NONE)
        text = jnp.pad(texts, ((0, 0), (back, 0)), constant_values=NONE)[:, : texts.shape[1]]
        alive &= (text == token) & (token != NONE)
        agree += alive
    # a place counts only if a token follows it
    follows = jnp.pad(texts[:, 1:], ((0, 0), (0, 1)), constant_values=NONE) != NONE
    agree = jnp.where(follows & (places < (ends[:, None] - 1 if context else own)), agree, 0)
    longest = jnp.max(agree, axis=1, keepdims=True)
    best = jnp.max(jnp.where(agree == longest, places, 0), axis=1)
    # A text that repeats itself up to the row's end goes on repeating itself.
    period = jnp.maximum(ends - 1 - best, 1)
    index = best[:, None] + 1 + jnp.arange(count) % period[:, None]
    found = jnp.take_along_axis(texts, jnp.minimum(index, texts.shape[1] - 1), axis=1)
    real = (found != NONE) & (longest > 0)
    return jnp.where(jnp.cumprod(real, axis=1) > 0, found, NONE)


class DraftTexts:
    """The texts of rows, on the host."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._known: weakref.WeakKeyDictionary[Row, _Growing] = weakref.WeakKeyDictionary()
        self._repeats: weakref.WeakKeyDictionary[Row, _Repeats] = weakref.WeakKeyDictionary()
        # By task, the newest last.
        self._earlier: collections.OrderedDict[str, collections.deque[np.ndarray]] = (
            collections.OrderedDict()
        )

    def put(self, row: Row, out: np.ndarray) -> None:
        """Writes a row's texts into ``out`` [draft_room + length], which is NONE everywhere."""
        room = self._config.draft_room
        own = self._tokens(row)
        out[room : room + len(own)] = own
        for text in self._others(row):
            room -= 1  # for what separates two texts
            if room <= 0:
                return
            part = text[-room:]  # its end, where not all of it fits
            out[room - len(part) : room] = part
            room -= len(part)

    def keep(self, row: Row) -> None:
        """Keeps the answer of a row that is over, for later rows of the same task; nothing where
        there are no drafts.
        """
        if self._config.draft_tokens and "task" in self._config.draft_sources:
            answers = self._answers(row.episode.task.id)
            answers.append(self._answer(row).copy())
            while sum(map(len, answers)) > self._config.draft_room and len(answers) > 1:
                answers.popleft()

    def repeats(self, row: Row) -> bool:
        """True if at least ``draft_least`` of a row's last ``draft_window`` tokens had followed the
        same two tokens before in the row.
        """
        c = self._config
        share = self._repeats.setdefault(row, _Repeats()).share(row.tokens, c.draft_window)
        return share >= c.draft_least

    def _others(self, row: Row) -> Iterator[np.ndarray]:
        """Answers to a row's prompt that are not its own, those of its group first."""
        if "group" in self._config.draft_sources:
            for other in row.group.rows:
                if other is not row and len(other.tokens) > other.prompt:
                    yield self._answer(other)
        if "task" in self._config.draft_sources:
            yield from reversed(self._answers(row.episode.task.id))

    def _answers(self, task: str) -> collections.deque[np.ndarray]:
        answers = self._earlier.setdefault(task, collections.deque())
        self._earlier.move_to_end(task)
        if len(self._earlier) > _TASKS:
            self._earlier.popitem(last=False)
        return answers

    def _answer(self, row: Row) -> np.ndarray:
        """Tokens behind a row's prompt, and as much of the prompt as is compared."""
        return self._tokens(row)[max(0, row.prompt - _LONGEST) :]

    def _tokens(self, row: Row) -> np.ndarray:
        """All tokens of a row, int32."""
        return self._known.setdefault(row, _Growing()).grown(row.tokens)


class _Growing:
    """A list of tokens as an array, to which those that were added to the list are added."""

    def __init__(self):
        self._array = np.empty(256, np.int32)
        self._count = 0

    def grown(self, tokens: Sequence[int]) -> np.ndarray:
        if len(tokens) > len(self._array):
            more = np.empty(max(len(tokens), 2 * len(self._array)), np.int32)
            more[: self._count] = self._array[: self._count]
            self._array = more
        self._array[self._count : len(tokens)] = tokens[self._count :]
        self._count = len(tokens)
        return self._array[: self._count]


class _Repeats:
    """Tokens of a list that had followed the same two tokens before in it."""

    def __init__(self):
        # What followed two tokens when they last stood in the list.
        self._follows: dict[tuple[int, ...], int] = {}
        # Of every token.
        self._found: list[bool] = []

    def share(self, tokens: Sequence[int], count: int) -> float:
        """The share of such tokens among the last ``count``."""
        for at in range(len(self._found), len(tokens)):
            before = tuple(tokens[max(0, at - 2) : at])
            self._found.append(self._follows.get(before) == tokens[at])
            self._follows[before] = tokens[at]
        return sum(self._found[-count:]) / count
