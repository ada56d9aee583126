"""The configuration of a model: shapes of its parameters and its forward pass.

Dimensions: those of ``transformer``.
"""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real
from typing import Literal

from attention.methods.api import DEFAULT
from attention.methods.dsa import check_indexers
from attention.methods.method import LayerShape, Method
from models.lora import LoRA
from models.quantised import Kind, check_kind
from models.rope_scaling import Scaling
from pallas_kernels.saved import ATTENTION, PRODUCT


@dataclasses.dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of the feed-forward part (``models.moe``).

    The defaults route as Qwen3-MoE does. DeepSeek-V3 has sigmoid scores, a ranking bias, groups, a
    scale, a shared expert, and dense first layers.
    """

    # E, the experts of a layer.
    experts: int
    # How many of them compute a token.
    active: int
    # F of one expert.
    mlp_dim: int
    # What turns the router's logits into scores: "softmax" over all experts (Qwen3-MoE), or
    # "sigmoid" of each (DeepSeek-V3).
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # Whether the weights of a token's experts, which are their scores, are divided by their sum
    # (Hugging Face's ``norm_topk_prob``).
    normalise: bool = True
    # The weights are multiplied by it.
    scale: float = 1.0
    # Whether each expert has a bias that is added to its score where experts are ranked, and
    # nowhere else. It gets no gradient: ``balance_rate`` moves it.
    ranking_bias: bool = False
    # Whether the router's logits and each product of an expert have a bias (gpt-oss).
    biases: bool = False
    # The most that ``functions.clipped_swiglu`` takes of gate and up; None for SwiGLU.
    limit: float | None = None
    # Experts are in so many groups of equal size, and a token's are all in ``active_groups`` of
    # them: those with the greatest sum of two scores.
    groups: int = 1
    active_groups: int = 1
    # Shared experts, which compute every token. They are one feed-forward part of size
    # shared * mlp_dim; 0 for none.
    shared: int = 0
    # Whether the result of the shared ones is multiplied by the sigmoid of a projection of its own.
    shared_gate: bool = False
    # So many first layers have no experts, and a dense part of ``ModelConfig.mlp_dim``.
    first_dense: int = 0
    # In training, the weight of the loss that evens out the load of experts; 0 for none.
    balance_loss: float = 0.0
    # In training, by how much an update moves each ranking bias to even out the load; 0 leaves the
    # biases as they are. DeepSeek-V3 has 0.001.
    balance_rate: float = 0.0
    # Where experts are cut over devices, a device has room for so many times the mean of what comes
    # to a device. What is more comes in further rounds, so no result depends on it.
    buffer: float = 2.0
    # Whether whole experts are cut over the mesh axes ``expert`` and ``tensor`` together, and not
    # over ``expert``, and each one's ``mlp_dim`` over ``tensor``.
    fold: bool = False
    # Matrices that are kept for each layer, of which those behind the first ``experts`` are zeros
    # and compute nothing (``models.padding``). None for as many as there are experts.
    slots: int | None = None

    def __post_init__(self):
        if not 0.0 < self.buffer < math.inf:
            raise ValueError(f"buffer={self.buffer} must be more than 0")
        if self.slots is not None and self.slots < self.experts:
            raise ValueError(f"slots={self.slots} must be at least experts={self.experts}")
        for name in ("balance_loss", "balance_rate"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.balance_rate and not self.ranking_bias:
            raise ValueError(
                f"balance_rate={self.balance_rate} moves the ranking bias of experts, and these "
                "have none: set ranking_bias=True, or use balance_loss"
            )
        if self.limit is not None and not 0.0 < self.limit < math.inf:
            raise ValueError(f"limit={self.limit} must be above 0, or None for SwiGLU")
        if self.limit is not None and self.shared:
            raise ValueError(f"limit={self.limit} is not supported beside shared={self.shared}")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores={self.scores!r} must be 'softmax' or 'sigmoid'")
        for name in ("experts", "active", "mlp_dim", "groups", "active_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("shared", "first_dense"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.experts % self.groups:
            raise ValueError(f"experts={self.experts} must be a multiple of groups={self.groups}")
        if self.active_groups > self.groups:
            raise ValueError(
                f"active_groups={self.active_groups} must be at most groups={self.groups}"
            )
        choice = self.experts // self.groups * self.active_groups
        if self.active > choice:
            raise ValueError(
                f"active={self.active} must be at most the {choice} experts of "
                f"active_groups={self.active_groups} groups"
            )
        if self.active_groups < self.groups and self.experts // self.groups < 2:
            raise ValueError(
                f"groups={self.groups} of experts={self.experts}: a group is ranked by its two "
                "best experts, so it must have two"
            )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model that must divide by the devices that share a layer."""

    # As in ``ModelConfig``.
    vocab_size: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    # ``MoE.mlp_dim`` and the matrices that are kept for each layer; None without experts.
    expert_mlp_dim: int | None = None
    experts: int | None = None

    @staticmethod
    def of(config: ModelConfig) -> Sizes:
        """Sizes of a model."""
        names = ("vocab_size", "mlp_dim", "num_heads", "num_kv_heads")
        own = {name: getattr(config, name) for name in names}
        moe = config.moe
        if moe is None:
            return Sizes(**own)
        return Sizes(**own, expert_mlp_dim=moe.mlp_dim, experts=moe.slots or moe.experts)

    def given_to(self, config: ModelConfig) -> ModelConfig:
        """A model with these sizes and the other settings of ``config``."""
        own = dataclasses.asdict(self)
        expert, slots = own.pop("expert_mlp_dim"), own.pop("experts")
        moe = config.moe
        if moe is not None:
            slots = None if slots == moe.experts else slots
            moe = dataclasses.replace(moe, mlp_dim=expert, slots=slots)
        return dataclasses.replace(config, **own, moe=moe)


# Names (``pallas_kernels.saved``) of what ``remat`` keeps of a layer beside the hidden states
# before it: nothing; results and log-sum-exps of attention, so that its forward pass runs once;
# those and the products with the layer's matrices but for experts, so that norms, rotation and
# SwiGLU alone are computed again.
REMAT_KEEPS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "attention": (ATTENTION,),
    "products": (ATTENTION, PRODUCT),
}

_HEADS = ("num_heads", "num_kv_heads", "head_dim")


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
    # ``model_type`` of the files that the model came from, which its own files have too. None for a
    # model that came from none: the first family with its options writes them.
    architecture: str | None = None
    # Whether q, k and v have a bias (Qwen2).
    qkv_bias: bool = False
    # Whether the result of attention has a bias behind its projection (Llama with
    # ``attention_bias``).
    o_bias: bool = False
    # Whether q and k pass through RMSNorm (Qwen3).
    qk_norm: bool = False
    # Whether RMSNorm multiplies by 1 and its weight, and not by its weight (Qwen3-Next).
    norm_offset: bool = False
    # Whether the result of attention is multiplied by the sigmoid of a gate, which is the second
    # half of each head of q's matrix (Qwen3-Next).
    output_gate: bool = False
    # The share of each head that RoPE rotates.
    partial_rotary: float = 1.0
    # A stretch of the wavelengths of RoPE; None for plain RoPE.
    rope_scaling: Scaling | None = None
    # Dtype of activations and products, by name, such as "float32".
    dtype: str = "float32"
    # Dtype in which parameters are kept.
    param_dtype: str = "float32"
    # Whether activations are computed again in the backward pass, to save memory.
    remat: bool = False
    # Results of a layer that ``remat`` keeps all the same: a key of ``REMAT_KEEPS``.
    remat_keeps: str = "nothing"
    # Whether the hidden states before each layer, which ``remat`` keeps, wait in pinned memory of
    # the host for the backward pass.
    offload_activations: bool = False
    # Whether activations between the products of a layer are cut over the mesh axis ``tensor`` by
    # tokens (sequence parallelism, 2205.05198).
    sequence_parallel: bool = False
    # The methods of the first layers, repeated until all layers have one.
    attention: tuple[Method, ...] = DEFAULT
    # Standard deviation of initial embeddings.
    embed_std: float = 0.02
    # Mixture of experts; None for a dense feed-forward part in every layer.
    moe: MoE | None = None
    # Low-rank adapters, which alone are trained; None to train all parameters.
    lora: LoRA | None = None
    # The 8-bit numbers as which a model that only samples keeps the matrices of its layers
    # (``models.quantised``); None for matrices in ``param_dtype``.
    quantised: Kind | None = None
    # What the sizes were before they were padded (``models.padding``); None for a shape that is as
    # its family has it.
    unpadded: Sizes | None = None

    def __post_init__(self):
        for name in ("vocab_size", "embed_dim", "mlp_dim", "num_layers", *_HEADS):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number from 1 on")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a number above 0")
        if self.remat_keeps not in REMAT_KEEPS:
            raise ValueError(
                f"remat_keeps={self.remat_keeps!r} must be one of {', '.join(REMAT_KEEPS)}"
            )
        if not isinstance(self.tied_embeddings, bool):
            raise ValueError(f"tied_embeddings={self.tied_embeddings!r} must be true or false")
        if not self.attention or self.num_layers % len(self.attention):
            raise ValueError(
                f"num_layers={self.num_layers} must be a multiple of the {len(self.attention)} "
                f"layers of attention={self.attention}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        check_kind(self.quantised)
        self._check_states()
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if not 0 < self.partial_rotary <= 1 or self.rotated % 2 or self.rotated < 2:
            raise ValueError(
                f"partial_rotary={self.partial_rotary} of head_dim={self.head_dim} must be an even "
                "number of elements, above 0"
            )
        if self.moe is not None:
            if self.lora is not None:
                self.lora.check_experts()
            dense = self.moe.first_dense
            if dense >= self.num_layers or (dense % len(self.attention) and not self.apart):
                raise ValueError(
                    f"moe.first_dense={dense} must be below num_layers={self.num_layers} and a "
                    f"multiple of the {len(self.attention)} layers of attention={self.attention}"
                )

    @property
    def apart(self) -> bool:
        """True for a model without a period, whose layers are computed one by one: dense ones and
        others with experts, of methods with projections of their own.
        """
        whole = len(self.attention) == self.num_layers and not self.attending
        return bool(whole and self.dense_layers % self.num_layers)

    def _check_states(self) -> None:
        """Raises ValueError for settings that layers with projections of their own do not have."""
        own = [method for method in self.attention if method.mixes]
        if not own:
            return
        if self.lora is not None:
            raise ValueError(f"lora={self.lora} is not supported beside {own[0]}")
        if self.unpadded is not None:
            raise ValueError(f"a padded shape is not supported beside {type(own[0]).__name__}")
        check_indexers(self.attention)
        states = [method for method in own if method.keeps_state]
        if len(states) == len(self.attention):
            raise ValueError(
                f"attention={self.attention}: every method keeps a state; at least one layer of "
                "the period must attend"
            )
        if states and self.quantised is not None:
            raise ValueError(f"quantised={self.quantised!r} is not supported beside {states[0]}")

    @property
    def rotated(self) -> int:
        """Elements of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary)

    @property
    def attending(self) -> tuple[int, ...]:
        """The places of the period whose layers have q, k, v and o."""
        return tuple(at for at, method in enumerate(self.attention) if not method.mixes)

    def attending_of(self, layers: int) -> int:
        """Number of layers with q, k, v and o among so many, which are whole periods."""
        return layers // len(self.attention) * len(self.attending)

    @property
    def periods(self) -> int:
        """Number of times that ``attention`` repeats over the layers."""
        return self.num_layers // len(self.attention)

    @property
    def dense_layers(self) -> int:
        """Number of first layers that have no experts in a model whose others have; else 0."""
        return 0 if self.moe is None else self.moe.first_dense

    @property
    def alignment(self) -> int:
        """Sequences packed without branches start at slots that are multiples of this number.

        It is the least common multiple of the blocks that layers choose from, and of the chunks of
        those that keep a state; 1 without any.
        """
        return math.lcm(*(method.block_size() or method.chunk(0) for method in self.attention))

    @property
    def layer_shape(self) -> LayerShape:
        """The sizes that the parameters of a method of attention depend on."""
        return LayerShape(self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim)
