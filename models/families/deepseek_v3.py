"""DeepSeek-V3: multi-head latent attention, and experts by sigmoid scores with a bias that ranks.

The layers behind the last one, which guess further tokens, are not read. Files in FP8 are expanded
when they are loaded. The template here writes what the protocol "deepseek_v3" does, with calls in
content as it was sampled, and has no place for tools.

Shapes are those of the published ``config.json`` of DeepSeek-V3.
"""

from __future__ import annotations

from attention.methods.mla import MLA
from models.families import dots1
from models.families.family import HARMLESS, Family
from models.families.latent import LATENT, score_factor
from models.families.parameters import EXPERTS, SHARED_EXPERT, with_experts, without_attention
from models.model_config import ModelConfig, MoE
from models.rope_scaling import Yarn

_TEMPLATE = r"""
{{- "<｜begin▁of▁sentence｜>" -}}
{%- for message in messages -%}
  {%- set behind = not loop.first and loop.previtem.role == "tool" -%}
  {%- if message.role == "tool" -%}
    {{- "\n" if behind else "<｜tool▁outputs▁begin｜>" -}}
    {{- "<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" -}}
    {{- "<｜tool▁outputs▁end｜>" if loop.last or loop.nextitem.role != "tool" else "" -}}
  {%- elif message.role == "assistant" -%}
    {{- ("" if behind else "<｜Assistant｜>") + message.content + "<｜end▁of▁sentence｜>" -}}
  {%- elif message.role == "system" -%}
    {{- message.content -}}
  {%- else -%}
    {{- "<｜User｜>" + message.content -}}
  {%- endif -%}
{%- endfor -%}
{{- "<｜Assistant｜>" if add_generation_prompt and messages[-1].role != "tool" else "" -}}
"""

_SCALING = Yarn(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
LAYER = MLA(
    latent=512,
    query_latent=1536,
    plain_size=128,
    value_size=128,
    interleaved=True,
    score_factor=score_factor(_SCALING),
)
SHAPE = ModelConfig(
    vocab_size=129_280,
    embed_dim=7168,
    mlp_dim=18_432,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    rope_scaling=_SCALING,
    attention=(LAYER,),
    moe=MoE(
        experts=256,
        active=8,
        mlp_dim=2048,
        scores="sigmoid",
        scale=2.5,
        ranking_bias=True,
        groups=8,
        active_groups=4,
        shared=1,
        first_dense=3,
    ),
)

FAMILY = Family(
    presets={"deepseek-v3": SHAPE},
    architecture="deepseek_v3",
    huggingface_class="DeepseekV3ForCausalLM",
    options={"qkv_bias": False, "qk_norm": False},
    parameters=with_experts(without_attention(LATENT), EXPERTS, SHARED_EXPERT),
    template=_TEMPLATE.strip(),
    ends=("<｜end▁of▁sentence｜>",),
    protocol="deepseek_v3",
    experts=dots1.FAMILY.experts,
    harmless={
        **HARMLESS,
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    latent=True,
    guesses=True,
)
