"""Makes the golden files of the parity tests with PyTorch and transformers, which the project
itself does not need.

In an environment of its own (any Python that PyTorch supports; made with torch 2.13 and
transformers 5.23):

    python -m venv /some/where && /some/where/bin/pip install torch transformers safetensors
    /some/where/bin/python tests/models/make_golden.py [NAME ...]         # writes golden/
    /some/where/bin/python tests/models/make_golden.py --check DIRECTORY  # what was exported

A directory to check holds a model, ``logits.npz`` with tokens and the project's logits, and perhaps
``texts.json`` with texts, their ids, messages and what the chat template makes of them.

Each model is small and random, with weights large enough that every part moves the logits. Weights
are rounded to bfloat16 and stored so; logits are computed in float32, those of models with states in
float64.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

GOLDEN = Path(__file__).parent / "golden"
VOCAB, TOKENS = 64, 48
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "attn_implementation": "eager",
}
# Of the 4 rotated pairs one is above, one inside and two below Llama 3.1's band.
SCALED = {
    "rope_theta": 1e4,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
PLAIN = {"rope_theta": 1e4, "rope_type": "default"}
# Three layers with a state and one with gated attention.
HYBRID = SMALL | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}
GATED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
GLM = {
    **SMALL,
    **HEADS,
    "num_hidden_layers": 3,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
# DeepSeek-V3's attention and experts.
LATENT = SMALL | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
# so many heads that no two scores are 0
INDEXERS = {"index_topk": 9, "index_n_heads": 12, "index_head_dim": 12}
# Of the 4 rotated pairs one stays, one is between and two are divided by the factor.
YARN = {
    "rope_theta": 1e4,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
# The borders between pairs are no whole numbers.
YARN_OF_GPT_OSS = {
    "rope_theta": 1e4,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "truncate": False,
}
MODELS = {
    # biases of q, k, v and o
    "llama_biased": LlamaConfig(
        **SMALL,
        **HEADS,
        rope_parameters=PLAIN | {"rope_type": "linear", "factor": 4.0},
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "mistral_windows": MistralConfig(
        **SMALL, **HEADS, rope_parameters=PLAIN, tie_word_embeddings=False, sliding_window=5
    ),
    "qwen2_windows": Qwen2Config(
        **SMALL | {"num_hidden_layers": 3},
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=PLAIN | {"rope_type": "dynamic", "factor": 4.0},
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3_windows": Qwen3Config(
        **SMALL | {"num_hidden_layers": 4},
        **HEADS,
        rope_parameters=PLAIN,
        tie_word_embeddings=False,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3_moe_windows": Qwen3MoeConfig(
        **SMALL,
        **HEADS,
        rope_parameters=PLAIN,
        tie_word_embeddings=False,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
    "glm4_moe": Glm4MoeConfig(
        **GLM,
        tie_word_embeddings=False,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm4_moe_air": Glm4MoeConfig(**GLM, tie_word_embeddings=False, use_qk_norm=False),
    "llama_scaled": LlamaConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=SCALED,
        tie_word_embeddings=False,
    ),
    "llama_tied": LlamaConfig(
        **SMALL,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters=PLAIN,
        tie_word_embeddings=True,
    ),
    "qwen2_tied": Qwen2Config(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_parameters=PLAIN,
        tie_word_embeddings=True,
    ),
    "qwen2_untied": Qwen2Config(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters=PLAIN,
        tie_word_embeddings=False,
    ),
    "qwen3_untied": Qwen3Config(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=PLAIN | {"rope_theta": 1e6},
        tie_word_embeddings=False,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters=PLAIN,
        tie_word_embeddings=False,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    ),
    "qwen3_next": Qwen3NextConfig(**HYBRID, **GATED_EXPERTS, norm_topk_prob=True),
    "qwen3_5": Qwen3_5TextConfig(**HYBRID | {"tie_word_embeddings": True}),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**HYBRID, **GATED_EXPERTS),
    # DeepSeek-V3's experts
    "dots1": Dots1Config(
        **SMALL | {"num_hidden_layers": 3},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters=PLAIN,
        tie_word_embeddings=False,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT, q_lora_rank=14, rope_parameters=YARN, n_group=4, topk_group=2
    ),
    # as Kimi K2, in one group; and as Moonlight, with queries from hidden states
    "deepseek_v3_plain": DeepseekV3Config(
        **LATENT | {"v_head_dim": 20},
        q_lora_rank=None,
        rope_interleave=False,
        rope_parameters=PLAIN,
        n_group=1,
        topk_group=1,
    ),
    # gates and ups are so large that the clip of the activation takes hold
    "gpt_oss": GptOssConfig(
        **SMALL | {"num_hidden_layers": 4, "intermediate_size": 12},
        **HEADS,
        rope_parameters=YARN_OF_GPT_OSS,
        tie_word_embeddings=False,
        sliding_window=6,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "deepseek_v32": DeepseekV32Config(
        **LATENT, **INDEXERS, q_lora_rank=14, rope_parameters=YARN, n_group=4, topk_group=2
    ),
    # every other layer takes the keys that the one before it chose
    "glm_moe_dsa": GlmMoeDsaConfig(
        **LATENT | {"num_hidden_layers": 4, "first_k_dense_replace": 2},
        **INDEXERS,
        q_lora_rank=14,
        rope_parameters=PLAIN,
        indexer_types=["full", "shared"] * 2,
    ),
    # in no period, by the rule of published files
    "glm_moe_dsa_apart": GlmMoeDsaConfig(
        **LATENT | {"num_hidden_layers": 5},
        **INDEXERS,
        q_lora_rank=14,
        rope_parameters=PLAIN,
        index_topk_freq=2,
    ),
}
SHARDED = {"qwen3_untied": 20_000}  # bytes per file
# Models of which the gradients are compared too.
DERIVED = (
    *("llama_biased", "qwen3_windows", "glm4_moe", "glm4_moe_air", "glm_moe_dsa_apart"),
    "gpt_oss",
)


def logits_of(
    directory: Path, tokens: np.ndarray, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Logits [1, T, V] of the checkpoint in ``directory``, in float32 and computed in ``dtype``."""
    # not all other implementations of experts take float64
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", **experts
    ).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def make(name: str) -> None:
    """Writes config.json, safetensors and logits.npz of one model."""
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter_name.endswith("norm.weight"):
                # in these models norms multiply by 1 and the weight
                offset = hasattr(MODELS[name], "linear_num_key_heads")
                offset = offset and not parameter_name.endswith("linear_attn.norm.weight")
                parameter.copy_((0 if offset else 1) + 0.3 * noise)
            elif parameter_name.endswith("dt_bias"):
                # a state that remembers some tens of tokens
                parameter.copy_(noise - 3)
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                # of experts, which are stacked, the last axis is that of the inputs too
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
                if name == "gpt_oss" and parameter_name.endswith("gate_up_proj"):
                    parameter.copy_(noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                # above 0: where a ranked score is below, transformers 4 departs from DeepSeek's code
                buffer.copy_(0.2 + 0.2 * torch.rand_like(buffer).round(decimals=2))
    directory = GOLDEN / name
    shutil.rmtree(directory, ignore_errors=True)
    limit = {"max_shard_size": SHARDED[name]} if name in SHARDED else {}
    model.to(torch.bfloat16).save_pretrained(directory, **limit)
    (directory / "generation_config.json").unlink()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, TOKENS), dtype=np.int32)
    # where results of a state are small, their norm makes more of the rounding of float32
    dtype = torch.float64 if hasattr(MODELS[name], "linear_num_key_heads") else torch.float32
    np.savez(directory / "logits.npz", tokens=tokens, logits=logits_of(directory, tokens, dtype))
    if name in DERIVED:
        gradients = gradients_of(directory, tokens)
        (directory / "gradients.json").write_text(json.dumps(gradients, indent=1) + "\n")


def gradients_of(directory: Path, tokens: np.ndarray) -> dict[str, tuple[float, float]]:
    """For each tensor of a checkpoint two numbers of the gradient of the mean loss of the next
    tokens, in float64: its norm, and its product with cos(0), cos(1), … in the tensor's order.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ids = torch.from_numpy(tokens).long()
    logits = model(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1)).backward()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        # as a checkpoint, for the names and the order that files have
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    return {
        name: (float(np.linalg.norm(x)), float(x.ravel() @ np.cos(np.arange(x.size))))
        for name, x in sorted(found.items())
        if "e_score_correction_bias" not in name
    }


def check(directory: Path) -> None:
    """Raises AssertionError unless transformers computes the logits of ``logits.npz`` from the
    weights beside it, and its tokenizer does what ``texts.json`` says.
    """
    golden = np.load(directory / "logits.npz")
    found = logits_of(directory, golden["tokens"])
    print("largest difference", np.abs(found - golden["logits"]).max())
    print("largest logit", np.abs(found).max())
    np.testing.assert_allclose(found, golden["logits"], rtol=1e-4, atol=1e-4)
    if not (directory / "texts.json").exists():
        return
    expected = json.loads((directory / "texts.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text, ids in expected["texts"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == tuple(expected["special"])
    rendered = tokenizer.apply_chat_template(
        expected["messages"], tokenize=False, add_generation_prompt=True
    )
    assert rendered == expected["rendered"]
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.generation_config.eos_token_id == expected["stop_ids"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", type=Path, help="a checkpoint with a logits.npz to compare with")
    parser.add_argument("names", nargs="*", help="models to make; all of them if none is named")
    chosen = parser.parse_args()
    directory = chosen.check
    if directory:
        check(directory)
    else:
        for name in chosen.names or MODELS:
            make(name)
