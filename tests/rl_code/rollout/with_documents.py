"""Tasks and episodes with documents in the prompt and in the results of tools, in tests."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tokens import Tokens
from rl_code.environment.documents import OUTSIDE, DocumentsConfig, place, rope_positions, seen_as
from tests.rl_code.rollout import small
from tests.rl_code.rollout.small import ENGINE, STOP, VOCAB

LONGEST = 16
# Pages of 4 tokens, and a document of at most four of them.
WITH_DOCUMENTS = dataclasses.replace(
    ENGINE, prompt_length=48, length=128, pages=160, longest_document=LONGEST, view_block=64
)


def document(seed: int, length: int) -> list[int]:
    """Tokens of a document."""
    return np.random.default_rng([9, seed]).integers(1, VOCAB, length).tolist()


def task_of(name: str, prompt, answers):
    """A task.

    prompt: pieces (tokens, whether they are a document). answers: for each turn the pieces of the
    tool's result.
    """
    return types.SimpleNamespace(id=name, prompt=prompt, answers=answers)


class DocumentEpisode(small.Episode):
    """Answers every message with pieces of the task, and the message's first token."""

    def __init__(self, *arguments, page=ENGINE.page, turns=3, **options):
        super().__init__(*arguments, turns=turns, **options)
        self.config = DocumentsConfig(longest=LONGEST, shortest=1, page=page)
        self.documents = []

    @property
    def budget(self):
        return min(7, 120 - len(self.tokens))

    def start(self):
        self._place(self.task.prompt)
        return list(self.tokens)

    def share(self, length):
        assert length == len(self.tokens)

    def step(self, tokens, logprobs, versions):
        self._add(tokens, logprobs, True)
        self.documents += [OUTSIDE] * len(tokens)
        self.versions += versions
        self.messages += 1
        if self.messages == self.turns:
            return None
        pieces = [([STOP, tokens[0]], False), *self.task.answers[self.messages - 1], ([3], False)]
        before = len(self.tokens)
        self._place(pieces)
        return self.tokens[before:]

    def finish(self):
        found = super().finish()
        (context,) = found.contexts
        context = dataclasses.replace(context, documents=np.array(self.documents))
        prompt = int(found.sampled.argmax())
        return dataclasses.replace(found, contexts=(context,), prompt_length=prompt)

    def _place(self, pieces):
        number = max(self.documents, default=0)
        tokens, kinds = place(pieces, len(self.tokens), max(0, number), self.config, STOP)
        self._add(tokens, [0.0] * len(tokens), False)
        self.documents += kinds


def trainer_logprobs(
    trajectories, model, length=WITH_DOCUMENTS.length, longest=LONGEST
) -> np.ndarray:
    """[trajectories, length, V] as whole rows compute them."""
    shape = (len(trajectories), length)
    tokens, positions, segments, documents = np.zeros((4, *shape), np.int32)
    for row, t in enumerate(trajectories):
        part = slice(0, len(t.tokens))
        tokens[row, part] = t.tokens
        positions[row, part] = rope_positions(t.documents, longest)
        segments[row, part], documents[row, part] = seen_as(t.documents)

    return np.asarray(_trainer(model, tokens, positions, segments, documents))


@jax.jit
def _trainer(model, tokens, positions, segments, documents):
    order = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    where = Tokens(segments, 0 * segments, documents, order)
    # documents start at multiples of the blocks' size
    hidden = model.hidden(tokens, positions, where, align=model.config.alignment)
    return jax.nn.log_softmax(model.logits(hidden))
