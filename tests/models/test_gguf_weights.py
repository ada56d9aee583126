"""GGUF files: what they hold is what the model computes with, and SmolLM2 from its file is
SmolLM2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gguf_weights, weights
from models.chat import render
from models.families import PRESETS
from models.sharding import MESHES, MeshConfig, make_mesh
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from tests.models.small import small_config
from tests.models.test_huggingface import assert_same, logits, random_model

CONFIG = small_config(vocab_size=24, embed_dim=32, mlp_dim=64, num_layers=2, rope_theta=1e5)
KINDS = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tied_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}
SMOLLM2 = Path(__file__).parents[2] / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.exists(), reason=f"no {SMOLLM2}: run bash launch/get_smollm2.sh"
)


Q8 = gguf.GGMLQuantizationType.Q8_0
Q4 = gguf.GGMLQuantizationType.Q4_1
F32 = gguf.GGMLQuantizationType.F32


def write(
    path: Path,
    kind: str,
    model: Transformer,
    quantise: bool = False,
    skip: str = "",
    output: tuple[np.ndarray, gguf.GGMLQuantizationType] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """The model as a GGUF file: as llama.cpp's converter writes it, matrices in Q8_0 if
    ``quantise``.

    output: a table and its quantisation for the tensor ``output.weight`` of a model whose
    embeddings are tied. metadata: writes more of it.
    """
    c = model.config
    writer = gguf.GGUFWriter(path, kind)
    metadata(writer)
    if output is not None:
        quantised = gguf.quantize(output[0], output[1])
        writer.add_tensor("output.weight", quantised, raw_dtype=output[1])
    writer.add_block_count(c.num_layers)
    writer.add_embedding_length(c.embed_dim)
    writer.add_feed_forward_length(c.mlp_dim)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    for name, parameter, variable, at in weights.stored_tensors(model, "gguf"):
        array = np.asarray(variable[...])[at]
        array = parameter.to_stored(array)
        heads = {"attn_q.weight": c.num_heads, "attn_k.weight": c.num_kv_heads}.get(
            name.split(".", 2)[-1]
        )
        if kind == "llama" and heads:
            halves = array.reshape(heads, 2, c.head_dim // 2, c.embed_dim)
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        if name == skip:
            continue
        if quantise and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [MeshConfig(data=1, tensor=1), MeshConfig(2, 2, fsdp=2)])
def test_a_float_file_loads_bit_exact(kind, mesh, tmp_path):
    model = random_model(dataclasses.replace(CONFIG, **KINDS[kind]))
    write(tmp_path / "model.gguf", kind, model)
    assert gguf_weights.read_config(tmp_path / "model.gguf") == model.config
    assert_same(gguf_weights.load(tmp_path / "model.gguf", model.config, make_mesh(mesh)), model)


def test_a_quantised_file_loads_within_its_precision(tmp_path):
    model = random_model(CONFIG)
    write(tmp_path / "model.gguf", "llama", model, quantise=True)
    loaded = gguf_weights.load(tmp_path / "model.gguf", CONFIG, make_mesh(MESHES["one"]))
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        error = np.abs(np.asarray(a) - np.asarray(b)).max()
        assert error < np.abs(np.asarray(a)).max() / 200
    assert not np.array_equal(np.asarray(model.layers.up[...]), np.asarray(loaded.layers.up[...]))


def test_missing_tensors_unknown_architectures_and_cut_files_are_named(tmp_path):
    path = tmp_path / "model.gguf"
    one = make_mesh(MESHES["one"])
    write(path, "llama", random_model(CONFIG), skip="blk.1.ffn_up.weight")
    with pytest.raises(
        ValueError, match=r"blk\.1\.ffn_up\.weight: expected \(64, 32\), found no such tensor"
    ):
        gguf_weights.load(path, CONFIG, one)
    write(path, "gemma", random_model(CONFIG))
    with pytest.raises(ValueError, match="architecture 'gemma' is not supported"):
        gguf_weights.read_config(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.gguf .* is not a whole GGUF file"):
        gguf_weights.read_config(path)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_second_copy_of_tied_embeddings_is_not_another_matrix(kind, tmp_path):
    path = tmp_path / "model.gguf"
    model = random_model(dataclasses.replace(CONFIG, **KINDS[kind] | {"tied_embeddings": True}))
    table = np.asarray(model.embed.table[...])
    for embedding_in_q8, output in ((False, Q8), (False, Q4), (True, F32)):
        write(path, kind, model, quantise=embedding_in_q8, output=(table, output))
        assert gguf_weights.read_config(path) == model.config
        loaded = gguf_weights.load(path, model.config, make_mesh(MESHES["one"]))
        # the copy with more bits is the one that is read
        np.testing.assert_array_equal(np.asarray(loaded.embed.table[...]), table)
    write(path, kind, model, output=(table[::-1].copy(), Q8))
    config = gguf_weights.read_config(path)
    assert config == dataclasses.replace(model.config, tied_embeddings=False)
    assert gguf_weights.load(path, config, make_mesh(MESHES["one"])).unembed.shape == (32, 24)
    with pytest.raises(ValueError, match=r"output\.weight: expected no such tensor"):
        gguf_weights.load(path, model.config, make_mesh(MESHES["one"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4),
        ("rope.scale_linear", 2),
        ("rope.dimension_count", 2),
        ("attention.value_length", 2),
        ("attention.sliding_window", 64),
        ("expert_count", 8),
    ],
)
def test_metadata_that_cannot_be_computed_is_named(key, value, tmp_path):
    add = "add_string" if isinstance(value, str) else "add_uint32"

    def metadata(writer: gguf.GGUFWriter) -> None:
        getattr(writer, add)(f"qwen2.{key}", value)

    model = random_model(dataclasses.replace(CONFIG, **KINDS["qwen2"]))
    write(tmp_path / "model.gguf", "qwen2", model, metadata=metadata)
    with pytest.raises(ValueError, match=rf"qwen2\.{key}={value!r}, which is not supported"):
        gguf_weights.read_config(tmp_path / "model.gguf")


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    return Tokenizer.from_gguf(SMOLLM2)


@needs_smollm2
def test_smollm2_is_the_published_model_and_has_its_loss_on_code(smollm2_tokenizer):
    assert hashlib.sha256(SMOLLM2.read_bytes()).hexdigest().startswith("b179c9523d0e6a0f")
    config = gguf_weights.read_config(SMOLLM2)
    assert config == dataclasses.replace(PRESETS["smollm2-135m"], architecture="llama")
    model = gguf_weights.load(SMOLLM2, config, make_mesh(MESHES["one"]))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == 134_515_008
    tokens = jnp.array(smollm2_tokenizer.encode(inspect.getsource(textwrap))[:512])[None]
    logprobs = jax.nn.log_softmax(logits(model, tokens)[:, :-1])
    loss = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()
    assert abs(float(loss) - 2.48) < 0.01


@needs_smollm2
def test_smollm2_tokens_come_back_as_text(smollm2_tokenizer):
    code = inspect.getsource(dataclasses)
    ids = smollm2_tokenizer.encode(code)
    assert smollm2_tokenizer.decode(ids) == code
    assert 3.7 < len(code) / len(ids) < 3.9
    for text in ("naïve 日本語 🎉 345 don't\r\n\t  x", "  leading and trailing  ", "a\n\n\n    b"):
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


@needs_smollm2
def test_smollm2_chat_marks_are_single_tokens(smollm2_tokenizer):
    tokenizer = smollm2_tokenizer
    assert tokenizer.vocab_size == 49_152
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 2)
    ids = tokenizer.encode(render("smollm2", [{"role": "user", "content": "hi 12"}]))
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert [tokenizer.encode(digits) for digits in ("1", "12")] == [[33], [33, 34]]
