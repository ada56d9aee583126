"""``config.json``: presets come back from it, and files that this model cannot compute are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attention.methods.dense import Dense
from attention.methods.window import Window
from models import huggingface_config
from models.families import PRESETS
from models.rope_scaling import DynamicScaling, LinearScaling
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


# What the published config.json of GLM-4.5 and GLM-4.5-Air say of their shapes.
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
AIR = GLM | {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "use_qk_norm": False,
}


@pytest.mark.parametrize(("name", "content"), [("glm-4.5", GLM), ("glm-4.5-air", AIR)])
def test_published_files_of_glm_are_its_presets(name, content):
    found = huggingface_config.config_from_dict(content)
    assert found == dataclasses.replace(PRESETS[name], architecture="glm4_moe")
    # a file that does not say it rotates half of each head, as transformers does
    del content["partial_rotary_factor"]
    assert huggingface_config.config_from_dict(content) == found
    assert huggingface_config.stop_ids(content) == {151329, 151336, 151338}
    written = huggingface_config.config_to_dict(found, max_positions=131072)
    assert written["num_nextn_predict_layers"] == 0  # they are not written


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("change", "methods"),
    [
        (QWEN2, (Dense(),)),
        (QWEN2 | {"sliding_window": 8}, (Dense(),)),
        # transformers' defaults: 4096 tokens from layer 28 on
        (QWEN2 | {"use_sliding_window": True}, (Dense(),)),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": 2},
            (Dense(), Dense(), Window(4096)),
        ),
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            (Window(8),),
        ),
        (
            QWEN3
            | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
            | {"layer_types": [SLIDING, FULL, SLIDING]},
            (Window(8), Dense(), Window(8)),
        ),
        ({"model_type": "mistral", "architectures": None}, (Window(4096),)),
        ({"model_type": "mistral", "architectures": None, "sliding_window": None}, (Dense(),)),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(change, methods):
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192) | change
    config = huggingface_config.config_from_dict(content)
    assert config.attention == methods
    written = huggingface_config.config_to_dict(config, max_positions=8192)
    assert huggingface_config.config_from_dict(written) == config


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4}, LinearScaling(4.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 8192)),
    ],
)
def test_rope_is_stretched_as_files_say(scaling, expected):
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192)
    config = huggingface_config.config_from_dict(content | {"rope_scaling": scaling})
    assert config.rope_scaling == expected
    # a longer context in training does not move the place from which it stretches
    written = huggingface_config.config_to_dict(config, max_positions=16_384)
    assert huggingface_config.config_from_dict(written) == config


def test_biases_of_attention_are_one_switch():
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192)
    config = huggingface_config.config_from_dict(content | {"attention_bias": True})
    assert config == dataclasses.replace(
        huggingface_config.config_from_dict(content), qkv_bias=True, o_bias=True
    )
    assert huggingface_config.config_to_dict(config, max_positions=8192)["attention_bias"] is True


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
        ({"attention_bias": "yes"}, "attention_bias='yes', which must be true or false"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be at least 1"),
        ({"rope_scaling": {"type": "linear"}}, "type 'linear' has no 'factor'"),
        (QWEN2 | {"use_sliding_window": 1}, "use_sliding_window=1; it must be true or false"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "sliding_window=0 by use_sliding_window; it must be a whole number",
        ),
        (
            QWEN2 | {"layer_types": [SLIDING] * 3, "sliding_window": 8},
            "sliding_window=None by use_sliding_window",
        ),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3},
            "only 'full_attention' and 'sliding_attention' are supported",
        ),
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


@pytest.mark.parametrize("first", [None, "3", 1.5, -1])
def test_a_window_without_a_known_first_layer_is_refused(first):
    content = json.loads((GOLDEN / "dots1" / "config.json").read_text()) | {"layer_types": None}
    with pytest.raises(ValueError, match=f"max_window_layers={first!r}"):
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
        (MISTRAL | {"sliding_window": "wide"}, "sliding_window='wide'; it must be"),
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
        (MISTRAL | {"attention_bias": True}, "attention_bias=True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
            "no 'max_position_embeddings'",
        ),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "RoPE of type 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "RoPE scaling of type 'linear' has no 'factor'",
        ),
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
        # the first layers, which are dense, would have to be a whole period
        (DOTS | {"num_hidden_layers": 63}, "first_dense=1 .*63 layers of attention"),
        (DOTS | {"sliding_window": 8, "max_window_layers": 2}, r"first_dense=1 .*Window\(window=8"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(change, words, tmp_path):
    content = huggingface_config.config_to_dict(CONFIG, max_positions=8192) | change
    content = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as error:
        huggingface_config.read_config(tmp_path)
    assert "config.json" in str(error.value)
