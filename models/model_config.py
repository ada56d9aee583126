"""What fixes the shapes of a model's parameters and its forward pass.

Dimensions: those of ``transformer``.
"""

from __future__ import annotations

import dataclasses
import math

from attention.methods.api import DEFAULT
from attention.methods.method import LayerShape, Method
from models.functions import RopeScaling


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes parameter shapes and the forward pass."""

    # V, the tokens that have embeddings and logits.
    vocab_size: int
    # D, the size of the residual stream.
    embed_dim: int
    # F, the hidden size of the feed-forward part.
    mlp_dim: int
    # L.
    num_layers: int
    # N query heads share K key/value heads, each N / K of them.
    num_heads: int
    num_kv_heads: int
    # H; even, since RoPE rotates pairs.
    head_dim: int
    # Base of the wavelengths of RoPE.
    rope_theta: float
    # Added to mean squares by RMSNorm.
    norm_eps: float
    # Whether logits come from the embeddings instead of a matrix of their own.
    tied_embeddings: bool
    # Whether q, k and v have a bias (Qwen2).
    qkv_bias: bool = False
    # Whether q and k pass through RMSNorm (Qwen3).
    qk_norm: bool = False
    # Llama 3.1's stretch of low frequencies; None for plain RoPE.
    rope_scaling: RopeScaling | None = None
    # Dtype of activations and products, by name, such as "float32".
    dtype: str = "float32"
    # Dtype in which parameters are kept.
    param_dtype: str = "float32"
    # Whether activations are computed again in the backward pass, to save memory.
    remat: bool = False
    # The methods of the first layers, repeated until all layers have one.
    attention: tuple[Method, ...] = DEFAULT
    # Standard deviation of initial embeddings.
    embed_std: float = 0.02

    def __post_init__(self):
        if not self.attention or self.num_layers % len(self.attention):
            raise ValueError(
                f"num_layers={self.num_layers} must be a multiple of the {len(self.attention)} "
                f"layers of attention={self.attention}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")

    @property
    def periods(self) -> int:
        """How often ``attention`` repeats over the layers."""
        return self.num_layers // len(self.attention)

    @property
    def alignment(self) -> int:
        """Sequences packed without branches start at slots that are multiples of this number.

        It is the least common multiple of the blocks that layers choose from, 1 without any.
        """
        return math.lcm(*(method.block_size() or 1 for method in self.attention))

    @property
    def layer_shape(self) -> LayerShape:
        """What the parameters of a method of attention depend on."""
        return LayerShape(self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim)
