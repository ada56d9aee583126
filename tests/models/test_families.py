"""Presets have the parameter counts that were published for them."""

from __future__ import annotations

import pytest

from models.families import PRESETS
from models.transformer import parameter_count

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-coder-0.5b": 494_032_768,
    "qwen2.5-coder-1.5b": 1_543_714_304,
    "qwen2.5-coder-7b": 7_615_616_512,
    "qwen2.5-coder-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


def test_tiny_trains_on_a_laptop():
    assert set(PRESETS) - set(PUBLISHED) == {"tiny"}
    assert parameter_count(PRESETS["tiny"]) < 1_000_000
