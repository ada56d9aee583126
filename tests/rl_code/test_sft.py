"""The demonstrations of a warm start, packed for the model that is trained."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from models.sharding import MeshConfig
from pallas_kernels.tokens import TAIL
from rl_code.config.read_config import ConfigError
from rl_code.environment.documents import DocumentsConfig
from rl_code.run.sections import SftConfig
from rl_code.sft import Demonstrations
from rl_code.tasks.demonstrations import Segment


def run_of(demonstration, alignment, documents=None, **sft):
    """What a warm start asks of a run whose tokens are characters."""
    settings = dict(demonstrations=3, rows=1, slots=64, optimizer=None) | sft
    sft = SftConfig(steps=1, **settings)
    return types.SimpleNamespace(
        config=types.SimpleNamespace(sft=sft, documents=documents, mesh=MeshConfig()),
        model_config=types.SimpleNamespace(alignment=alignment),
        tokenizer=types.SimpleNamespace(
            encode=lambda text: [ord(letter) for letter in text], pad_id=0
        ),
        demonstrations=types.SimpleNamespace(numbered=demonstration),
    )


@pytest.mark.parametrize("alignment", [1, 8])
def test_demonstrations_start_where_the_models_blocks_of_keys_do(alignment):
    texts = ["ab" * 5, "c" * 21, "de" * 3]
    run = run_of(lambda index: [Segment(texts[index], True)], alignment, slots=40)
    batch, position = Demonstrations(run).batch(0)
    segments = batch.where.segments[0]
    assert position == (3 if alignment == 1 else 2) and batch.align == alignment
    for segment, text in enumerate(texts[:position], start=1):
        (slots,) = np.nonzero(segments == segment)
        assert slots[0] % alignment == 0
        assert "".join(map(chr, batch.tokens[0, slots])) == text


@pytest.mark.parametrize(
    "lengths, least, shape",
    [
        ((5, 7, 6), None, (1, 64)),
        ((5, 7, 6), 4, (8, 8)),
        ((5, 7, 6), 16, (4, 16)),
        ((5, 20, 6), 4, (2, 32)),
        ((5, 40, 6), 4, (1, 64)),
        ((60, 5, 5), 4, (1, 64)),
    ],
)
def test_rows_are_as_short_as_the_examples_of_their_batch_allow(lengths, least, shape):
    run = run_of(lambda i: [Segment("a" * lengths[i], True)], 1, least_slots=least)
    demonstrations = Demonstrations(run)
    position = 0
    for _ in range(5):
        batch, after = demonstrations.batch(position)
        assert batch.tokens.shape == shape and after > position
        # nothing is lost: every token of the examples that were taken is there
        taken = [lengths[i % 3] for i in range(position, after)]
        assert batch.mask.sum() == sum(taken)
        position = after


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_what_the_agent_reads_has_a_weight_of_its_own(weight):
    parts = [Segment("see", False), Segment("ok", True), Segment("and", False), Segment("on", True)]
    batch, position = Demonstrations(run_of(lambda index: parts, 1, weight_of_read=weight)).batch(0)
    one = [weight] * 3 + [1.0] * 2 + [weight] * 3 + [1.0] * 2
    assert position == 6 and batch.mask[0].tolist() == one * 6 + [0.0] * 4


def test_decisive_tokens_weigh_more_where_the_agent_writes_them():
    parts = [Segment("ny", False), Segment("any", True), Segment("y", True, learned=False)]
    run = run_of(lambda i: parts, 1, slots=6, decisive=("n", "y"), weight_of_decisive=3.0)
    batch, _ = Demonstrations(run).batch(0)
    assert batch.mask[0].tolist() == [0.0, 0.0, 1.0, 3.0, 3.0, 0.0]
    with pytest.raises(ConfigError, match=r"'yes', which the tokenizer cuts into 3 tokens"):
        Demonstrations(run_of(lambda i: parts, 1, decisive=("n", "yes")))


def test_what_the_agent_gets_wrong_is_not_learned():
    parts = [Segment("see", False), Segment("no", True, learned=False), Segment("on", True)]
    batch, position = Demonstrations(run_of(lambda index: parts, 1, weight_of_read=0.25)).batch(0)
    assert position == 9 and batch.mask[0].tolist() == ([0.25] * 3 + [0.0] * 2 + [1.0] * 2) * 9 + [
        0.0
    ]


def test_demonstrations_hold_their_documents():
    documents = dataclasses.replace(DocumentsConfig(longest=16, shortest=2), page=8)
    parts = [Segment("see", False), Segment("a file", False, document=True), Segment("?", False)]
    run = run_of(lambda index: [*parts, Segment("ok", True)], 8, documents)
    batch, position = Demonstrations(run).batch(0)
    assert position == 2 and batch.mask[0, :20].tolist() == [0] * 17 + [1, 1] + [0]
    assert batch.where.segments[0, :20].tolist() == [1] * 3 + [0] * 5 + [1] * 6 + [0] * 2 + [
        1
    ] * 3 + [0]
    assert batch.where.documents[0, 8:14].tolist() == [1] * 6
    assert batch.where.documents[0, 16:19].tolist() == [TAIL] * 3
    assert batch.where.order[0, 24:27].tolist() == [0, 1, 2]
    assert batch.positions[0, :19].tolist() == [16, 17, 18, *[0] * 5, *range(6), 0, 0, 19, 20, 21]
