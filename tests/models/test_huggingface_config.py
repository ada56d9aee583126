"""``config.json``: presets come back from it, and files that this model cannot compute are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from models import huggingface_config
from models.families import PRESETS
from tests.models.test_huggingface import CONFIG, GOLDEN


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back_from_its_config_file(name):
    written = json.loads(
        json.dumps(huggingface_config.config_to_dict(PRESETS[name], max_positions=8192))
    )
    # the file tells the shape of parameters that are there, not how random ones are drawn
    expected = dataclasses.replace(
        PRESETS[name], embed_std=0.02, architecture=written["model_type"]
    )
    assert huggingface_config.config_from_dict(written) == expected


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LATENT = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text()) | {"rope_theta": None}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
DOTS = json.loads((GOLDEN / "dots1" / "config.json").read_text()) | {
    "layer_types": None,
    "sliding_window": None,
    "rope_theta": None,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling='linear', which is no object"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\], which is no object"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a number"),
        ({"rope_scaling": {"factor": 4.0}}, "factor=4.0 for RoPE of type 'default'"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor=0.0 must be above 0"),
        ({"rope_scaling": LLAMA3 | {"factor": [8]}}, "type 'llama3': float"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor=4.0 must be below"),
        ({"layer_types": 5}, "layer_types=5; only 'full_attention'"),
        ({"layer_types": ["full_attention"]}, "once for each of num_hidden_layers=3"),
        ({"num_hidden_layers": None}, "num_layers=None must be a whole number from 1 on"),
        ({"num_hidden_layers": 0}, "num_layers=0 must be a whole number"),
        ({"vocab_size": "24"}, "vocab_size='24' must be a whole number"),
        ({"hidden_size": True}, "embed_dim=True must be a whole number"),
        ({"rms_norm_eps": None}, "norm_eps=None must be a number above 0"),
        ({"tie_word_embeddings": "false"}, "tied_embeddings='false' must be true or false"),
    ],
)
def test_values_of_a_wrong_kind_are_refused_by_name(change, message):
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192)
    with pytest.raises(ValueError, match=message):
        huggingface_config.config_from_dict(content | change)


@pytest.mark.parametrize("first", [None, "3", 1.5])
def test_a_window_without_a_known_first_layer_is_refused(first):
    content = json.loads((GOLDEN / "dots1" / "config.json").read_text()) | {"layer_types": None}
    with pytest.raises(ValueError, match=f"max_window_layers={first}"):
        huggingface_config.config_from_dict(
            content | {"sliding_window": 4, "max_window_layers": first}
        )


@pytest.mark.parametrize("found", ["</s>", ["1"], [[1]], 1.0, True, -1, {"a": 1}, [1, None]])
def test_ends_of_a_turn_that_are_no_ids_are_refused(found):
    with pytest.raises(ValueError, match="must be the id of a token, or a list of ids"):
        huggingface_config.stop_ids({"eos_token_id": found})


@pytest.mark.parametrize("found", ["4096", 0, -5, 4096.5, True, float("inf")])
def test_contexts_of_no_length_are_refused(found):
    with pytest.raises(ValueError, match=r"max_position_embeddings=.* must be a whole number"):
        huggingface_config.max_positions({"max_position_embeddings": found})


def test_rope_may_be_said_twice_in_the_same_words_and_windows_be_out_of_reach():
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192)
    theta = content["rope_theta"]
    once = huggingface_config.config_from_dict(content | {"rope_scaling": LLAMA3})
    both = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": theta}}
    assert once.rope_scaling is not None
    assert huggingface_config.config_from_dict(content | both) == once
    # one says the base of the wavelengths and the other how they are stretched
    parts = {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": theta}}
    assert huggingface_config.config_from_dict(content | parts) == once
    short = json.loads((GOLDEN / "dots1" / "config.json").read_text())
    wanted = huggingface_config.config_from_dict(short)
    for change in (
        {"layer_types": None},
        {"sliding_window": None, "max_window_layers": 1, "layer_types": None},
        {"sliding_window": 8, "max_window_layers": 3, "layer_types": []},
        {"sliding_window": 8, "max_window_layers": 1},
    ):
        assert huggingface_config.config_from_dict(short | change) == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        (MISTRAL, "sliding_window=4096, .* from max_window_layers=0 on"),
        (MISTRAL | {"sliding_window": 4096, "layer_types": []}, "sliding_window=4096"),
        (MISTRAL | {"layer_types": ["full_attention"] * 3}, "layer_types=.* only "),
        (
            {"architectures": ["MistralForCausalLM"]},
            r"architectures=\['MistralForCausalLM'\], .* only 'LlamaForCausalLM'",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only 'LlamaForCausalLM'"),
        ({"model_type": "qwen2"}, "only 'Qwen2ForCausalLM' for model_type 'qwen2'"),
        ({"model_type": "deepseek_v2"}, "model_type 'deepseek_v2' is not supported"),
        ({"model_type": "deepseek_v3"}, "only 'DeepseekV3ForCausalLM' for model_type"),
        (LATENT | {"topk_method": "greedy"}, "topk_method='greedy'.* only 'noaux_tc'"),
        (LATENT | {"kv_lora_rank": 0}, "latent=0 must be a whole number from 1 on"),
        (LATENT | {"v_head_dim": None}, "no 'v_head_dim'"),
        (LATENT | {"rope_interleave": "yes"}, "rope_interleave='yes', not true or false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'}.* only quant_method='fp8'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size': .128.}, which is not supported",
        ),
        ({"model_type": "qwen3_moe", "architectures": None}, "no 'num_experts'"),
        (
            {"model_type": "qwen3_moe", "architectures": None, "decoder_sparse_step": 2},
            "decoder_sparse_step=2",
        ),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"rope_theta": None}, "no 'rope_theta'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "RoPE of type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no 'original_max_position"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast=0.5 must be at least beta_slow"),
        ({"rope_scaling": YARN | {"mscale": [1]}}, "RoPE scaling of type 'yarn': float"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "has no 'low_freq_factor'"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
            "rope_type='default' in rope_parameters and 'llama3' in rope_scaling",
        ),
        (
            {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 4.0}},
            r"factor=8\.0 in rope_parameters and 4\.0 in rope_scaling",
        ),
        (
            {"rope_parameters": {"rope_theta": 7.0}},
            r"rope_theta=10000\.0 in config\.json and 7\.0 in rope_parameters",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "type": "default"}}, "'default' in rope_scaling"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
            "original_max_position_embeddings=64 in config.json and 8192",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
            "rope_parameters.full_attention=.* RoPE that differs by layer",
        ),
        (
            DOTS | {"num_hidden_layers": 63},
            "sliding_window=4096, .*max_window_layers=62 .*num_hidden_layers=63",
        ),
        (DOTS | {"sliding_window": 8, "max_window_layers": 2}, "sliding_window=8"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(change, words, tmp_path):
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192) | change
    content = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as error:
        huggingface_config.read_config(tmp_path)
    assert "config.json" in str(error.value)
