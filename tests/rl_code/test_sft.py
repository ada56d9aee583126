"""The demonstrations of a warm start, packed for the model that is trained."""

from __future__ import annotations

import types

import numpy as np
import pytest

from rl_code.sft import Demonstrations
from rl_code.tasks.demonstrations import Segment


@pytest.mark.parametrize("alignment", [1, 8])
def test_demonstrations_start_where_the_models_blocks_of_keys_do(alignment):
    texts = ["ab" * 5, "c" * 21, "de" * 3]
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(sft=types.SimpleNamespace(demonstrations=3, slots=64)),
        model_config=types.SimpleNamespace(alignment=alignment),
        tokenizer=types.SimpleNamespace(encode=lambda text: [ord(letter) for letter in text]),
        demonstration=lambda index: [Segment(texts[index], True)],
    )
    batch, position = Demonstrations(run).batch(0, rows=1, slots=40)
    segments = batch.where.segments[0]
    assert position == (3 if alignment == 1 else 2) and batch.align == alignment
    for segment, text in enumerate(texts[:position], start=1):
        (slots,) = np.nonzero(segments == segment)
        assert slots[0] % alignment == 0
        assert "".join(map(chr, batch.tokens[0, slots])) == text
