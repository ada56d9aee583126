"""Bytes that an update takes on a device beside weights, moments and gradients, by arithmetic."""

from __future__ import annotations

import jax

from models.model_config import ModelConfig
from models.sharding import MeshConfig
from models.target_logprobs import chunk_size
from planner import attention_costs as costs
from planner.workload import FLOAT32, Workload, copies_sent


def activations(
    job: Workload, mesh: MeshConfig, tokens: int, gathered: float, loss: bool = True
) -> tuple[float, float]:
    """Bytes on a device for a micro-batch of one row: (what the part that computes needs, a layer
    or the loss; hidden states that all layers keep, and what ``remat_keeps`` adds to them).

    tokens: of the row that are computed. gathered: elements of all parameters, whole along
    ``fsdp``. loss: whether the loss is computed of them.
    """
    model = job.model
    own = tokens / (mesh.context or 1)
    compute = jax.numpy.dtype(model.dtype).itemsize
    stream = own * model.embed_dim * compute
    # gate, up, and their product
    inner = 3 * _hidden(model) + costs.layer_elements(model)
    # A layer's backward pass holds its arrays and their gradients (2). Of the model's width they
    # are its input, the results of both norms, and the sum between its halves (4). For 1.72 billion
    # parameters on an H100 the compiled program has 13.5 GB beside weights and moments, and this
    # comes within 5 % of it (tests/planner/test_plan.py).
    layer = 2 * 4 * stream + 2 * own * inner * compute / mesh.tensor
    # rows that a device sends, and room for those that it gets, and the results of both (2)
    if model.moe is not None and (copies := copies_sent(model, mesh)):
        layer += 2 * (1 + model.moe.buffer) * copies * stream
    # queries and their cotangents, and float32 gradients, of each query and block that it chose
    of_picks = costs.gathered_elements(model, round(own)) / mesh.tensor
    layer += of_picks * (2 * compute + FLOAT32)
    at_once = gathered * compute / model.num_layers if (mesh.fsdp or 1) > 1 else 0.0
    kept = model.num_layers * (stream + own * _kept_elements(model) * compute / mesh.tensor)
    return max(layer + at_once, _loss_bytes(job, mesh) if loss else 0.0), kept


def two_phases(
    job: Workload, mesh: MeshConfig, micro: float, elements: float, gathered: float
) -> dict[str, float]:
    """Bytes on a device, by part, of an update whose prompts are computed before it
    (``rl_code.learner.two_phase``).

    micro: micro-batches. elements: of the parameters on the device; gathered: of those with what is
    cut over ``fsdp``.
    """
    model = job.model
    own = job.prompts / (mesh.context or 1)
    compute = jax.numpy.dtype(model.dtype).itemsize
    keys = own * costs.new_elements(model) * compute / mesh.tensor
    of_prompts, waiting = activations(job, mesh, job.prompts, gathered, loss=False)
    of_rest, kept = activations(job, mesh, job.context - job.prompts, gathered)
    # As compiled for a CPU (tests/planner/test_memory.py). With the rest of a row: the keys of its
    # prompts, taken from those of all rows and copied once, and their gradient (3); those of one
    # layer beside the row's own, and their gradient (2). In the backward pass of prompts: gradients
    # of the parameters summed over rows, beside those of the rest; the gradient of the keys of one
    # row, taken and copied once (2).
    rest = of_rest + kept + 3 * keys + 2 * keys / model.num_layers
    working = max(rest, of_prompts + FLOAT32 * elements + 2 * keys)
    return {
        # from the first phase to the second
        "prompts": micro * (waiting + keys),
        # of the keys of all rows
        "prompts' gradients": micro * keys,
        "working": working,
    }


def _loss_bytes(job: Workload, mesh: MeshConfig) -> float:
    """Bytes that the loss of a row needs on a device, as ``models.target_logprobs`` makes it."""
    model = job.model
    targets = job.predicted / (mesh.context or 1)
    vocabulary = model.vocab_size / mesh.tensor
    compute = jax.numpy.dtype(model.dtype).itemsize
    # the logits of a part of the vocabulary, and their gradient
    logits = targets * chunk_size(int(targets), int(vocabulary)) * (FLOAT32 + compute)
    # the matrix in the dtype of products and its gradient in float32; the hidden states, theirs in
    # float32 and the sum of theirs over parts of the vocabulary (2)
    matrix = vocabulary * model.embed_dim * (FLOAT32 + compute)
    return logits + matrix + targets * model.embed_dim * (2 * FLOAT32 + compute)


def _kept_elements(model: ModelConfig) -> float:
    """Elements that a layer keeps of a token for the backward pass beside its hidden state."""
    attended = model.num_heads * costs.pair(model) / 2
    keys = (model.num_heads + model.num_kv_heads) * costs.pair(model)
    shared = model.moe.mlp_dim * model.moe.shared if model.moe else 0
    products = keys / 2 + model.num_kv_heads * costs.pair(model) / 2 + model.embed_dim
    products += 2 * (shared if model.moe else model.mlp_dim)
    if not model.remat:
        # norms, what is rotated, SwiGLU
        return attended + products + 3 * model.embed_dim + keys / 2 + _hidden(model)
    return {"nothing": 0.0, "attention": attended, "products": attended + products}[
        model.remat_keeps
    ]


def _hidden(model: ModelConfig) -> int:
    """Hidden size of what the feed-forward part of a layer computes for a token."""
    if model.moe is None:
        return model.mlp_dim
    return model.moe.mlp_dim * (model.moe.active + model.moe.shared)
