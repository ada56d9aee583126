"""Bytes that a device sends in a step, by kind of collective, by arithmetic."""

from __future__ import annotations

import jax

from models.sharding import MeshConfig
from planner import attention_costs as costs
from planner.collectives import Kind
from planner.workload import (
    FLOAT32,
    Workload,
    copies_sent,
    expert_devices,
    expert_elements,
    expert_layers,
    folded,
    passes,
)

# An all-reduce sends what a reduce-scatter and an all-gather send together: in a ring each device
# sends (n - 1) / n of the array twice.
_SUM = 2


def by_learner(
    job: Workload, mesh: MeshConfig, micro: float, elements: float, gathered: float
) -> dict[Kind, float]:
    """Bytes that a device sends in a GRPO step, by kind of collective.

    micro: micro-batches. elements: of the parameters on one device; gathered: of those with what is
    cut over ``fsdp``.
    """
    model = job.model
    parts, expert, tensor = mesh.fsdp or 1, mesh.expert or 1, mesh.tensor
    context = mesh.context or 1
    own = job.context / context
    compute = jax.numpy.dtype(model.dtype).itemsize
    # in the backward pass gradients travel the same ways
    sent = in_layers(job, mesh, own, times=passes(model) * micro)
    if context > 1:
        pair = own * model.num_kv_heads / tensor * costs.pair(model)
        # in the backward pass float32 gradients of keys and values go round beside them
        size = model.num_layers * micro * context * pair * (passes(model) * compute + FLOAT32)
        kind = Kind("collective-permute", context, context * expert * tensor > job.target.domain)
        sent[kind] = size
    if parts > 1:
        span = parts * context * expert * tensor
        # forward and once more in the backward pass, which computes a layer again with what it has
        _add(sent, job, "all-gather", parts, span, 2 * micro * gathered * compute)
        _add(sent, job, "reduce-scatter", parts, span, micro * gathered * FLOAT32)
    # all but experts are the same along ``expert``
    experts = expert_elements(model)[0] / (parts * expert * tensor)
    alike = mesh.data * context
    for copies, part in ((alike * expert, elements - experts), (alike, experts)):
        if copies > 1:
            _add(sent, job, "all-reduce", copies, mesh.devices, _SUM * part * FLOAT32)
    return sent


def in_layers(job: Workload, mesh: MeshConfig, tokens: float, times: float) -> dict[Kind, float]:
    """Bytes that a device sends in several passes over all layers, by kind of collective.

    tokens: that the devices along ``tensor`` compute together.
    """
    model = job.model
    expert, tensor = mesh.expert or 1, mesh.tensor
    stream = tokens * model.embed_dim * jax.numpy.dtype(model.dtype).itemsize
    sent: dict[Kind, float] = {}
    if tensor > 1:
        whole_experts = expert_layers(model) if folded(model) else 0
        # two sums in each layer, behind attention and behind the feed-forward part (1909.08053); in
        # place of the second one the tokens of the other devices
        sums = times * (2 * model.num_layers - whole_experts) * stream
        _add(sent, job, "all-reduce", tensor, tensor, _SUM * sums)
        _add(sent, job, "all-gather", tensor, tensor, times * whole_experts * stream)
    # to the experts and back (2) in each pass
    size = 2 * times * expert_layers(model) * copies_sent(model, mesh) * stream
    _add(sent, job, "ragged-all-to-all", expert_devices(model, mesh), expert * tensor, size)
    return sent


def _add(
    sent: dict[Kind, float], job: Workload, operation: str, devices: int, span: int, size: float
) -> None:
    """Adds what a device sends in collectives over ``devices`` that lie within ``span``.

    size: bytes of the whole result, times ``_SUM`` for a sum. A ring sends (n - 1) / n of them
    from each of n devices, the least that any algorithm sends without help of the switch
    (NVLink SHARP halves a sum, and is not counted).
    """
    if not size:
        return
    kind = Kind(operation, devices, span > job.target.domain)
    sent[kind] = sent.get(kind, 0.0) + size * (devices - 1) / devices
