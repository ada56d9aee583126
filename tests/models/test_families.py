"""Presets have the parameter counts that were published; families agree with their protocols."""

from __future__ import annotations

import dataclasses

import pytest

from models import families
from models.families import FAMILIES, PRESETS
from models.transformer import parameter_count
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.run.sections import ModelSpec

MINE = dataclasses.replace(PRESETS["tiny"], num_layers=2)

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-coder-0.5b": 494_032_768,
    "qwen2.5-coder-1.5b": 1_543_714_304,
    "qwen2.5-coder-7b": 7_615_616_512,
    "qwen2.5-coder-32b": 32_763_876_352,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    # without the layers that guess further tokens
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3.2": 671_877_944_064,
    "glm-5": 743_911_218_432,
    # of the text models alone
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


def test_models_to_train_on_a_laptop_are_small():
    own = set(PRESETS) - set(PUBLISHED)
    assert own == {"tiny", "tiny_reader", "small_reader", "reader", "tiny_moe"}
    most = {name: 1_100_000 for name in own - {"tiny_moe"}} | {"reader": 8_100_000}
    assert all(parameter_count(PRESETS[name]) < count for name, count in most.items())


def test_experts_that_compute_a_token_are_as_many_parameters_as_the_dense_model():
    dense, sparse = PRESETS["tiny"], PRESETS["tiny_moe"]
    idle = sparse.moe.experts - sparse.moe.active
    one = 3 * sparse.embed_dim * sparse.moe.mlp_dim * sparse.num_layers
    more = sparse.num_layers * (sparse.embed_dim * sparse.moe.experts + 2 * sparse.head_dim)
    assert parameter_count(sparse) - idle * one - more == parameter_count(dense)


def test_a_familys_protocol_writes_calls_as_the_family_does():
    for name, family in FAMILIES.items():
        protocol = PROTOCOLS[family.protocol]
        assert getattr(protocol, "calls", None) == family.call_format, name
        assert family.end in protocol.stop_tokens, name


def test_files_of_every_architecture_and_models_of_every_preset_have_a_family():
    for name, family in FAMILIES.items():
        found = families.of_architecture(family.architecture)
        assert found.parameters == family.parameters, name
        for config in family.presets.values():
            assert families.of_config(config).architecture == family.architecture, name
    with pytest.raises(ValueError, match=r"'gemma' is not supported, only llama, mistral, qwen2"):
        families.of_architecture("gemma")
    both = dataclasses.replace(PRESETS["tiny"], qkv_bias=True, qk_norm=True)
    with pytest.raises(ValueError, match="no model family has qkv_bias=True together with qk_norm"):
        families.of_config(both)


def test_a_preset_may_be_an_object_from_anywhere():
    spec = ModelSpec(preset="tests.models.test_families:MINE")
    assert spec.shape() is MINE
