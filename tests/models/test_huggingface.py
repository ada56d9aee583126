"""Hugging Face checkpoints: transformers' logits, bit-exact round trips, sharded loading, errors
that name tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import huggingface
from models.families import PRESETS
from models.functions import RopeScaling
from models.model_config import ModelConfig, MoE
from models.padding import pad, pad_config
from models.sharding import MESHES, MeshConfig, make_mesh, parameter_shardings
from models.transformer import Transformer, abstract_model
from pallas_kernels.tokens import packed_rows

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
CONFIG = ModelConfig(
    vocab_size=24,
    embed_dim=16,
    mlp_dim=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
)
VARIANTS = {
    "llama": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True},
    "bfloat16": {"param_dtype": "bfloat16"},
    "qwen3_moe": {"qk_norm": True, "moe": MoE(experts=4, active=2, mlp_dim=8, normalise=False)},
    "dots1": {
        "qk_norm": True,
        "moe": MoE(
            experts=6,
            active=2,
            mlp_dim=8,
            scores="sigmoid",
            scale=2.5,
            ranking_bias=True,
            groups=3,
            active_groups=2,
            shared=1,
            first_dense=1,
        ),
    },
}


@pytest.fixture(scope="module")
def one():
    return make_mesh(MESHES["one"])


def random_model(config: ModelConfig) -> Transformer:
    """A model all of whose parameters are random, norms and biases too."""
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw(leaf.shape).astype(leaf.dtype)), abstract_model(config)
    )


@jax.jit
def logits(model: Transformer, tokens: jax.Array) -> jax.Array:
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model.hidden(tokens, positions, packed_rows(ones, 0 * ones, positions)))


def assert_same(a: Transformer, b: Transformer):
    """Equal configs, dtypes and bits."""
    assert a.config == b.config
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name, one):
    golden = np.load(GOLDEN / name / "logits.npz")
    model = huggingface.load(GOLDEN / name, huggingface.read_config(GOLDEN / name), one)
    np.testing.assert_allclose(
        logits(model, golden["tokens"]), golden["logits"], rtol=1e-4, atol=1e-5
    )


def test_golden_logits_depend_on_rope_scaling(one):
    directory = GOLDEN / "llama_scaled"
    golden = np.load(directory / "logits.npz")
    config = dataclasses.replace(huggingface.read_config(directory), rope_scaling=None)
    model = huggingface.load(directory, config, one)
    assert np.abs(logits(model, golden["tokens"]) - golden["logits"]).max() > 0.01


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_file_bytes", [10**9, 4000])
def test_saved_and_loaded_is_bit_exact(variant, max_file_bytes, one, tmp_path):
    model = random_model(dataclasses.replace(CONFIG, **VARIANTS[variant]))
    huggingface.save(tmp_path, model, max_positions=512, max_file_bytes=max_file_bytes)
    assert (tmp_path / huggingface.INDEX).exists() == (max_file_bytes == 4000)
    config = dataclasses.replace(
        huggingface.read_config(tmp_path), param_dtype=model.config.param_dtype
    )
    assert_same(huggingface.load(tmp_path, config, one), model)


def test_files_stay_below_their_limit_and_hold_every_tensor_once(tmp_path):
    huggingface.save(tmp_path, random_model(CONFIG), max_positions=512, max_file_bytes=4000)
    held = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    index = json.loads((tmp_path / huggingface.INDEX).read_text())
    assert sorted(held) == sorted(index["weight_map"])
    for path in tmp_path.glob("*.safetensors"):
        assert sum(array.nbytes for array in load_file(path).values()) <= 4000


def test_experts_are_loaded_into_their_shards(tmp_path):
    model = random_model(dataclasses.replace(CONFIG, **VARIANTS["dots1"]))
    huggingface.save(tmp_path, model, max_positions=512)
    mesh = make_mesh(MeshConfig(data=1, tensor=2))
    loaded = huggingface.load(tmp_path, huggingface.read_config(tmp_path), mesh)
    assert_same(loaded, model)
    assert loaded.layers.expert_down[...].addressable_shards[1].data.shape == (2, 6, 4, 16)


@pytest.mark.parametrize("mesh", [MeshConfig(data=4, tensor=2), MeshConfig(2, 2, fsdp=2)])
def test_a_sharded_load_is_the_whole_model_laid_out_by_the_table(mesh, tmp_path):
    model = random_model(dataclasses.replace(CONFIG, qkv_bias=True))
    huggingface.save(tmp_path, model, max_positions=512)
    mesh = make_mesh(mesh)
    loaded = huggingface.load(tmp_path, huggingface.read_config(tmp_path), mesh)
    assert_same(loaded, model)
    for leaf, sharding in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(parameter_shardings(model, mesh)), strict=True
    ):
        assert leaf.sharding == sharding
    width = 16 // mesh.shape["fsdp"]
    assert loaded.layers.q[...].addressable_shards[0].data.shape == (3, width, 2, 6)
    huggingface.save(tmp_path / "again", loaded, max_positions=512)
    first, second = (
        (path / "model.safetensors").read_bytes() for path in (tmp_path, tmp_path / "again")
    )
    assert first == second


def test_a_padded_model_is_read_from_the_files_of_the_model_itself(tmp_path):
    """Four heads on three devices."""
    model = random_model(dataclasses.replace(CONFIG, qkv_bias=True))
    huggingface.save(tmp_path, model, max_positions=512)
    config = pad_config(huggingface.read_config(tmp_path), 3)
    assert (config.num_heads, config.num_kv_heads) == (6, 3)
    loaded = huggingface.load(tmp_path, config, make_mesh(MeshConfig(data=1, tensor=3)))
    like = abstract_model(config)
    assert_same(loaded, jax.jit(lambda x: pad(x, like))(model))


def test_experts_of_zeros_are_neither_in_files_nor_expected_there(tmp_path):
    """Four experts on three devices."""
    moe = MoE(experts=4, active=2, mlp_dim=8)
    model = random_model(dataclasses.replace(CONFIG, qk_norm=True, moe=moe))
    huggingface.save(tmp_path / "itself", model, max_positions=512)
    config = pad_config(model.config, 1, 3)
    loaded = huggingface.load(tmp_path / "itself", config, make_mesh(MeshConfig(expert=3)))
    assert loaded.layers.expert_up[...].addressable_shards[0].data.shape[1] == 2
    like = abstract_model(config)
    assert_same(loaded, jax.jit(lambda x: pad(x, like))(model))
    huggingface.save(tmp_path / "padded", loaded, max_positions=512)
    for name in ("model.safetensors", "config.json"):
        one, other = (tmp_path / folder / name for folder in ("itself", "padded"))
        assert one.read_bytes() == other.read_bytes()


def test_loading_converts_to_the_dtype_asked_for(one):
    directory = GOLDEN / "qwen2_tied"
    config = huggingface.read_config(directory)
    full = huggingface.load(directory, config, one)
    half = huggingface.load(directory, dataclasses.replace(config, param_dtype="bfloat16"), one)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    # the files hold bfloat16
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(half), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b, np.float32))


def test_wrong_missing_and_unexpected_tensors_are_all_named(one, tmp_path):
    huggingface.save(tmp_path, random_model(CONFIG), max_positions=512)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.self_attn.q_proj.weight"] = np.zeros((23, 16), np.float32)
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((20, 16), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        huggingface.load(tmp_path, CONFIG, one)
    assert str(tmp_path) in str(error.value)
    assert set(str(error.value).split("\n  ")[1:]) == {
        "model.layers.1.mlp.up_proj.weight: expected (20, 16), found no such tensor",
        "model.layers.2.self_attn.q_proj.weight: expected (24, 16), found (23, 16)",
        "model.layers.3.mlp.up_proj.weight: expected no such tensor, found (20, 16)",
    }


def test_broken_or_missing_files_are_named(one, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        huggingface.load(tmp_path, CONFIG, one)
    huggingface.save(tmp_path, random_model(CONFIG), max_positions=512, max_file_bytes=4000)
    with pytest.raises(FileExistsError, match=r"model-00001-of"):
        huggingface.save(tmp_path, random_model(CONFIG), max_positions=512)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{first.name} is not a whole safetensors file"):
        huggingface.load(tmp_path, CONFIG, one)
    second.unlink()
    first.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{first.name}, which {huggingface.INDEX} needs"):
        huggingface.load(tmp_path, CONFIG, one)


def test_a_tied_checkpoint_may_hold_its_embedding_twice_but_not_another_head(one, tmp_path):
    model = random_model(dataclasses.replace(CONFIG, tied_embeddings=True))
    huggingface.save(tmp_path, model, max_positions=512)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(huggingface.load(tmp_path, model.config, one), model)
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head\.weight: expected no such tensor, found \(24, 16\)"
    ):
        huggingface.load(tmp_path, model.config, one)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back_from_its_config_file(name):
    written = json.loads(json.dumps(huggingface.config_to_dict(PRESETS[name], max_positions=8192)))
    # the file tells the shape of parameters that are there, not how random ones are drawn
    expected = dataclasses.replace(PRESETS[name], embed_std=0.02)
    assert huggingface.config_from_dict(written) == expected


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
    content = huggingface.config_to_dict(CONFIG, max_positions=8192)
    with pytest.raises(ValueError, match=message):
        huggingface.config_from_dict(content | change)


@pytest.mark.parametrize("first", [None, "3", 1.5])
def test_a_window_without_a_known_first_layer_is_refused(first):
    content = json.loads((GOLDEN / "dots1" / "config.json").read_text()) | {"layer_types": None}
    with pytest.raises(ValueError, match=f"max_window_layers={first}"):
        huggingface.config_from_dict(content | {"sliding_window": 4, "max_window_layers": first})


@pytest.mark.parametrize("found", ["</s>", ["1"], [[1]], 1.0, True, -1, {"a": 1}, [1, None]])
def test_ends_of_a_turn_that_are_no_ids_are_refused(found):
    with pytest.raises(ValueError, match="must be the id of a token, or a list of ids"):
        huggingface.stop_ids({"eos_token_id": found})


@pytest.mark.parametrize("found", ["4096", 0, -5, 4096.5, True, float("inf")])
def test_contexts_of_no_length_are_refused(found):
    with pytest.raises(ValueError, match=r"max_position_embeddings=.* must be a whole number"):
        huggingface.max_positions({"max_position_embeddings": found})


def test_rope_may_be_said_twice_in_the_same_words_and_windows_be_out_of_reach():
    content = huggingface.config_to_dict(CONFIG, max_positions=8192)
    theta = content["rope_theta"]
    once = huggingface.config_from_dict(content | {"rope_scaling": LLAMA3})
    both = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": theta}}
    assert once.rope_scaling is not None
    assert huggingface.config_from_dict(content | both) == once
    # one says the base of the wavelengths and the other how they are stretched
    parts = {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": theta}}
    assert huggingface.config_from_dict(content | parts) == once
    short = json.loads((GOLDEN / "dots1" / "config.json").read_text())
    wanted = huggingface.config_from_dict(short)
    for change in (
        {"layer_types": None},
        {"sliding_window": None, "max_window_layers": 1, "layer_types": None},
        {"sliding_window": 8, "max_window_layers": 3, "layer_types": []},
        {"sliding_window": 8, "max_window_layers": 1},
    ):
        assert huggingface.config_from_dict(short | change) == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported"),
        ({"model_type": "qwen3_moe"}, "no 'num_experts'"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"rope_theta": None}, "no 'rope_theta'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn'"),
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
    content = huggingface.config_to_dict(CONFIG, max_positions=8192) | change
    content = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as error:
        huggingface.read_config(tmp_path)
    assert "config.json" in str(error.value)


@pytest.mark.skipif(
    "TRANSFORMERS_PYTHON" not in os.environ,
    reason="TRANSFORMERS_PYTHON does not name a Python that has transformers (see make_golden.py)",
)
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_saved(name, one, tmp_path):
    model = huggingface.load(GOLDEN / name, huggingface.read_config(GOLDEN / name), one)
    huggingface.save(tmp_path, model, max_positions=1024, max_file_bytes=30_000)
    shutil.copy(GOLDEN / name / "logits.npz", tmp_path)
    script = Path(__file__).parent / "make_golden.py"
    subprocess.run([os.environ["TRANSFORMERS_PYTHON"], script, "--check", tmp_path], check=True)
