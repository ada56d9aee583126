"""The program that samples: a loop whose steps each run the last token of every row, draw the next
one, and with drafts several.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache.gathered import GatheredPages
from attention.cache.paged import PagedCache
from attention.methods.method import Parameters
from attention.picks import choosing, compact, narrowest, noted_dtype, noted_shape
from models.adapter_rows import for_rows
from models.layers import Layers
from models.paged import decode_tokens, gather_pages, put_pages_back
from models.sharding import per_shard, shared_by
from models.transformer import Transformer
from rl_code.rollout.decode_input import DecodeInput
from rl_code.rollout.drafts import NONE, propose
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.own_way import sample_own
from rl_code.rollout.sampling import SamplingConfig, sample, stop_mask, token_uniforms
from rl_code.types import MOST_ALTERNATIVES


def decode(
    model: Transformer,
    cache: PagedCache,
    inputs: DecodeInput,
    *,
    config: EngineConfig,
    sampling: SamplingConfig,
    stop_ids: tuple[int, ...],
    view_block: int,
):
    """Samples tokens of every active row in up to ``decode_steps`` steps. A row ends at a stop
    token, or when its budget is used.

    With texts to copy from each step guesses the next tokens of a row, runs them together with its
    last one, draws a token after each, and keeps those draws whose guesses before were right. Keys
    of wrong guesses stay in the cache: nobody sees them before they are written over, since the
    next step begins at the first of them.

    view_block: tokens of a block of the view; 0 to read keys on their pages.
    Returns (cache, tokens int32 [slots, dispatch_tokens], logprobs float32 [slots,
    dispatch_tokens], counts int32 [slots], choices: what ``Context.choices`` has for each token
    [slots, dispatch_tokens, ...], and with ``inputs.ways`` "alternatives" and "likely", the most
    likely tokens in place of each (``own_way.sample_own``), steps int32 [slots] in which each row
    gained tokens, drafted int32 [slots]: tokens that were guessed).
    """
    model = for_rows(model, inputs.adapters)
    if inputs.texts is None:
        config = config.without_drafts()
    views = {}
    layers = None
    if view_block:
        # The layers are cut out of their stack before the loop, since on CPU a slice is a copy. The
        # barrier keeps the compiler from moving the slices back into the loop.
        layers = jax.lax.optimization_barrier(model.unstacked())
        # The greatest number of tokens behind the shared prefix that any row will have at the end
        # of this dispatch: further blocks of the view stay empty.
        reach = jnp.max(
            jnp.where(inputs.active, inputs.places - inputs.rows.starts + inputs.budgets - 1, 0)
        )
        views = gather_pages(cache, inputs.rows, view_block, reach, inputs.places)
    loop = _Loop(
        model,
        layers,
        inputs,
        config,
        sampling,
        stop_ids,
        picks_dtype=_picks_dtype(cache, config),
        index=jnp.arange(1 + config.draft_tokens),
        row=jnp.arange(inputs.tokens.shape[0])[:, None],
        together=() if model.config.moe is None else shared_by("experts"),
    )
    end = jax.lax.while_loop(loop.runs, loop.step, loop.start(cache, views))
    cache, views = end.held
    cache = put_pages_back(
        cache, views, inputs.rows, inputs.places, end.counts, config.dispatch_tokens
    )
    results = (end.out_tokens, end.out_logprobs, end.counts, end.choices, end.steps, end.drafted)
    return cache, *results


def _picks_dtype(cache: PagedCache, config: EngineConfig) -> np.dtype | None:
    """The dtype of the picks that are noted; None where none are."""
    if not config.note_picks or choosing(cache.methods) is None:
        return None
    return noted_dtype(cache.methods, config.table * config.page)


class _Decoding(NamedTuple):
    """State that a dispatch of the decoder carries from step to step."""

    step: jax.Array
    # The cache, and the pages that are laid side by side.
    held: tuple[PagedCache, dict[int, GatheredPages]]
    # Of every row: the last token, whether it goes on, and how many tokens it has sampled.
    tokens: jax.Array
    active: jax.Array
    counts: jax.Array
    # Whether any row goes on, here or in a shard that tokens are exchanged with.
    goes_on: jax.Array
    # What it has sampled.
    out_tokens: jax.Array
    out_logprobs: jax.Array
    choices: dict[str, jax.Array]
    # What drafts are copied from, with what it has sampled; None without drafts.
    texts: jax.Array | None
    # The steps in which it gained tokens, and the tokens that were guessed.
    steps: jax.Array
    drafted: jax.Array


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The steps of a dispatch, and what is the same in all of them."""

    model: Transformer
    # ``model.unstacked()``; None to unstack in each step.
    layers: Sequence[tuple[Layers, Parameters]] | None
    inputs: DecodeInput
    config: EngineConfig
    sampling: SamplingConfig
    stop_ids: tuple[int, ...]
    # The dtype of the picks that are noted; None where none are.
    picks_dtype: np.dtype | None
    # 0 to the number of guesses, [1 + drafts], and 0 to the last row, [rows, 1].
    index: jax.Array
    row: jax.Array
    # The axes over which this shard exchanges tokens at every step.
    together: tuple[str, ...]

    def start(self, cache: PagedCache, views: dict[int, GatheredPages]) -> _Decoding:
        """The state before the first step."""
        inputs = self.inputs
        shape = (len(self.row), self.config.dispatch_tokens)
        choices = self._no_choices(cache, shape)
        nothing = jnp.zeros(len(self.row), jnp.int32)
        return _Decoding(
            step=jnp.int32(0),
            held=(cache, views),
            tokens=inputs.tokens,
            active=inputs.active,
            goes_on=self._goes_on(inputs.active),
            counts=nothing,
            out_tokens=jnp.zeros(shape, jnp.int32),
            out_logprobs=jnp.zeros(shape, jnp.float32),
            choices=choices,
            texts=inputs.texts,
            steps=nothing,
            drafted=nothing,
        )

    def _no_choices(self, cache: PagedCache, shape: tuple[int, int]) -> dict[str, jax.Array]:
        """Room for the choices of all tokens [rows, tokens]."""
        found = {}
        model = self.model.config
        if self.config.note_picks and model.moe is not None:
            noted = (*shape, model.num_layers - model.moe.first_dense, model.moe.active)
            found["experts"] = jnp.zeros(noted, narrowest(model.moe.experts))
        if self.picks_dtype is not None:
            noted = (*shape, *noted_shape(cache.methods, model.num_kv_heads))
            found["blocks"] = jnp.zeros(noted, self.picks_dtype)
        if self.inputs.ways is not None:
            noted = (*shape, min(MOST_ALTERNATIVES, self.inputs.ways.biases.shape[-1]))
            found["alternatives"] = jnp.zeros(noted, jnp.int32)
            found["likely"] = jnp.zeros(noted, jnp.float32)
        return found

    def runs(self, carry: _Decoding) -> jax.Array:
        """True if there is another step."""
        return (carry.step < self.config.decode_steps) & carry.goes_on

    def step(self, carry: _Decoding) -> _Decoding:
        """The state after one more step."""
        inputs = self.inputs
        guesses, ends = self._guess(carry)
        # the last token of every row, and guesses at those behind it that it may still sample
        tokens = jnp.concatenate([carry.tokens[:, None], jnp.maximum(guesses, 0)], axis=1)
        left = inputs.budgets - carry.counts
        real = carry.active[:, None] & (self.index < left[:, None])
        real &= jnp.pad(guesses != NONE, ((0, 0), (1, 0)), constant_values=True)
        positions = (inputs.places + carry.counts)[:, None] + self.index
        places = jnp.where(real, positions, -1)
        rows = (inputs.rows, inputs.tables, tokens, places, self.layers, inputs.runs)
        note = self.config.note_picks
        hidden, cache, views, noted = decode_tokens(self.model, *carry.held, *rows, note=note)
        sampled, logprobs, alternatives = self._draw(hidden, positions, carry)
        taken = self._taken(sampled, guesses, real)
        gained = jnp.sum(taken, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(sampled, jnp.maximum(gained - 1, 0)[:, None], axis=1)[:, 0]
        counts = carry.counts + gained
        active = carry.active & (counts < inputs.budgets)
        if self.stop_ids:
            active = active & ~stop_mask(last, self.stop_ids)
        append = functools.partial(self._append, carry, taken)
        choices = self._choices(carry.choices, alternatives, noted, append)
        texts = carry.texts
        if self.config.draft_tokens:
            texts = append(texts, sampled, ends)
        return _Decoding(
            step=carry.step + 1,
            held=(cache, views),
            tokens=jnp.where(carry.active, last, carry.tokens),
            active=active,
            goes_on=self._goes_on(active),
            counts=counts,
            out_tokens=append(carry.out_tokens, sampled),
            out_logprobs=append(carry.out_logprobs, logprobs),
            choices=choices,
            texts=texts,
            steps=carry.steps + carry.active,
            drafted=carry.drafted + jnp.sum(real[:, 1:], axis=1, dtype=jnp.int32),
        )

    def _goes_on(self, active: jax.Array) -> jax.Array:
        some = jnp.any(active)
        return jax.lax.pmax(some.astype(jnp.int32), self.together) > 0 if self.together else some

    def _guess(self, carry: _Decoding) -> tuple[jax.Array, jax.Array | None]:
        """(guesses at the next tokens [rows, drafts], the end of each row's text)."""
        config = self.config
        if not config.draft_tokens:
            return jnp.zeros((len(self.row), 0), jnp.int32), None
        ends = config.draft_room + self.inputs.places + carry.counts + 1
        guess = functools.partial(
            propose,
            count=config.draft_tokens,
            own=config.draft_room,
            context="context" in config.draft_sources,
        )
        return per_shard(guess, ((), ()), ())(carry.texts, ends), ends

    def _draw(
        self, hidden: jax.Array, positions: jax.Array, carry: _Decoding
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(a token after each one that was run [rows, 1 + drafts], its log-probability, the likely
        tokens in place of it where rows have ways of their own).
        """
        inputs = self.inputs
        count = len(self.index)

        def each(x):
            """A value of each row for each of its tokens."""
            return jnp.repeat(x, count, axis=0)

        keys = (each(inputs.keys), each(inputs.groups), each(inputs.samples))
        uniforms = token_uniforms(*keys, positions.reshape(-1))
        # Every device of the axis tensor samples from all logits. The compiler would cut the
        # running sums of the cumulative distribution with exchanges that all devices of the mesh
        # have to join, and the shards of rows do not go through this loop together.
        logits = self.model.logits(hidden.reshape(len(self.row) * count, -1))
        alternatives = {}
        if inputs.ways is None:
            one = functools.partial(sample, config=self.sampling)
            drawn = per_shard(one, ((), ()), ((), ()))(logits, uniforms)
        else:
            own = functools.partial(sample_own, config=self.sampling)
            draw = per_shard(own, ((), (), (), ()), ((), (), (), ()))
            first = carry.counts == 0
            *drawn, tokens_there, likely = draw(logits, uniforms, first, inputs.ways)
            alternatives = {"alternatives": tokens_there, "likely": likely}
        sampled, logprobs = (x.reshape(len(self.row), -1) for x in drawn)
        return sampled, logprobs, alternatives

    def _taken(self, sampled: jax.Array, guesses: jax.Array, real: jax.Array) -> jax.Array:
        """True for the draws that count [rows, 1 + drafts]: those behind guesses that were all
        right, and none of which ended the message.
        """
        right = sampled[:, :-1] == guesses
        if self.stop_ids:
            right &= ~stop_mask(sampled[:, :-1], self.stop_ids)
        right = jnp.pad(right, ((0, 0), (1, 0)), constant_values=True)
        return real & (jnp.cumprod(right, axis=1) > 0)

    def _append(
        self,
        carry: _Decoding,
        taken: jax.Array,
        out: jax.Array,
        x: jax.Array,
        first: jax.Array | None = None,
    ) -> jax.Array:
        """``out`` with a value of each token that counts, from place ``first`` of its row on: by
        default behind those of the steps before.
        """
        if not self.config.draft_tokens:
            keep = taken.reshape(len(self.row), 1, *(1 for _ in x.shape[2:]))
            return out.at[:, carry.step].set(jnp.where(keep, x, 0)[:, 0])
        first = carry.counts if first is None else first
        at = jnp.where(taken, first[:, None] + self.index, out.shape[1])
        return out.at[self.row, at].set(x, mode="drop")

    def _choices(self, choices, alternatives, noted, append) -> dict[str, jax.Array]:
        """The choices with those of this step. noted: picks and experts, by layer."""
        picks, experts = noted
        found = {name: x[:, None] for name, x in alternatives.items()}
        if picks:
            most = choices["blocks"].shape[-1]
            blocks = [compact(x, most, self.picks_dtype) for x in picks]
            found["blocks"] = jnp.stack(blocks, axis=2)
        if experts:
            found["experts"] = jnp.stack(experts, axis=2).astype(choices["experts"].dtype)
        return choices | {name: append(choices[name], x) for name, x in found.items()}
