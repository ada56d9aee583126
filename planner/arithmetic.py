"""Costs of a step of learning and of a step of sampling on a mesh, by arithmetic.

Memory of weights, moments and gradients follows from the layout of the parameters
(``models.sharding``) and is exact. Activations, bytes of HBM and collectives are counted as the
programs are written: heads and sizes that do not divide by ``tensor`` are padded, parameters that
are cut over ``fsdp`` are gathered for each layer in the forward and the backward pass, activations
of layers are computed again in the backward pass, and the results of attention and of the
feed-forward part are summed over ``tensor``. Tokens travel to experts that are cut over ``expert``,
as many to each device. Of rows that are cut over ``context`` keys go round, and the device with the
last tokens of a row, which see the most, is the one that counts. The compiled program has the last
word (``planner.compiled``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from models.model_config import ModelConfig
from models.padding import pad_config
from models.sharding import MeshConfig, abstract_mesh
from models.target_logprobs import KEPT
from models.transformer import abstract_model
from planner import attention_costs as costs
from planner import memory, sent
from planner.workload import (
    FLOAT32,
    Estimate,
    Workload,
    expert_devices,
    expert_elements,
    expert_layers,
    passes,
)
from rl_code.run.dry_run import device_bytes

# Moments of AdamW (1412.6980, m and v; others keep no more).
_MOMENTS = 2
# Products of a matrix in an update, each of 2 operations for an element and token: forward, and one
# each for the gradients of its input and of itself.
_PRODUCTS = 3
# Reads and writes of hidden states in HBM for each micro-batch and pass over its layers. It is a
# floor: a compiler fuses less than all between two products. HBM bounds no learner in
# docs/benchmarks/meshes.md.
_TRAFFIC = 2


def meshes(
    devices: int, *, fsdp: bool, experts: bool = False, context: bool = False
) -> Iterator[MeshConfig]:
    """Every mesh of so many devices; without fsdp those that sample.

    experts: whether the model has some, which the axis expert is for. context: whether rows are so
    long that they may be cut.
    """
    choices = (fsdp, experts, context)
    for tensor in _divisors(devices):
        left = devices // tensor
        every = (_divisors(left) if chosen else [1] for chosen in choices)
        for parts in itertools.product(*every):
            if left % math.prod(parts):
                continue
            of_fsdp, expert, of_context = (size if size > 1 else None for size in parts)
            data = left // math.prod(parts)
            yield MeshConfig(data, tensor, of_fsdp, expert=expert, context=of_context)


def learner(job: Workload, mesh: MeshConfig) -> Estimate:
    """A GRPO step. Raises ValueError where the model or the rows do not fit the mesh's axes."""
    itself, job = job, padded(job, mesh)
    model = job.model
    rows = job.tokens / job.context
    if rows % mesh.row_shards:
        raise ValueError(
            f"{rows:g} rows of {job.context} tokens must divide by data x fsdp x expert = "
            f"{mesh.row_shards}"
        )
    context = mesh.context or 1
    if job.context % context:
        raise ValueError(f"rows of {job.context} tokens do not divide by context")
    micro = rows / mesh.row_shards
    cut, whole = (_parameters(job, mesh, gathered) for gathered in (False, True))
    size = jax.numpy.dtype(model.param_dtype).itemsize
    compute = jax.numpy.dtype(model.dtype).itemsize
    elements, gathered = cut / size, whole / size
    moments = _MOMENTS * FLOAT32 * elements
    working, kept = memory.activations(job, mesh, job.context, gathered)
    several = micro > 1 and model.dtype != model.param_dtype
    # of moments that wait on the host, those of a layer at a time are on the device
    taken = {
        "weights": cut,
        "moments": moments / model.num_layers if job.offload_moments else moments,
        # one stack, to which every micro-batch adds in place
        "gradients": FLOAT32 * elements,
        # matrices of layers in the dtype of their products, made once for all micro-batches
        "casts": _cast_elements(job, mesh) * compute if several else 0.0,
        "working": working if model.offload_activations else kept + working,
    }
    moved = _TRAFFIC * passes(model) * taken["working"]
    if job.prompts:
        taken |= memory.two_phases(job, mesh, micro, elements, gathered)
    host = {"moments": moments} if job.offload_moments else {}
    if model.offload_activations:
        host["hidden states"] = kept
    flops, attention = _update_operations(job, mesh)
    return Estimate(
        "learner",
        mesh,
        taken,
        flops=flops * micro,
        useful=_useful(itself) / (mesh.tensor * context) * micro,
        attention=attention * micro,
        # gradients are read and written once for each micro-batch (2), and the update reads and
        # writes weights and moments (2)
        hbm=micro * (passes(model) * gathered * compute + 2 * FLOAT32 * elements + moved)
        + 2 * (cut + moments),
        sent=sent.by_learner(job, mesh, micro, elements, gathered),
        tokens=job.tokens,
        host=host,
    )


def actor(job: Workload, mesh: MeshConfig) -> Estimate:
    """One token for every row. Raises ValueError where the model does not fit the mesh's axes."""
    itself, job = _sampling(job), padded(_sampling(job), mesh)
    model = job.model
    weights = _parameters(job, mesh, whole=True)
    size = jax.numpy.dtype(model.dtype).itemsize
    key = costs.cached_bytes(model, mesh.tensor)
    pages = job.rows * job.context * key
    read = job.rows * costs.read_bytes(job, mesh.tensor)
    elements = weights / size - _table(model) / mesh.tensor
    # experts that no row of those that share them needs are not read
    expert = mesh.expert or 1
    kept, computing = (x / (mesh.tensor * expert) for x in expert_elements(model))
    needed = 0.0
    if model.moe is not None:
        unused = 1 - model.moe.active / model.moe.experts
        needed = computing / (1 - unused) * (1 - unused ** (job.rows * expert))
    products, attention, chosen = _decode(job, mesh)
    touched = (elements - kept + needed) * size
    # logits in float32, and as many numbers while a token is drawn from them (2); all of the
    # vocabulary, which is gathered over tensor
    logits = 2 * FLOAT32 * job.rows * model.vocab_size
    return Estimate(
        "actor",
        mesh,
        {"weights": weights, "pages": pages, "working": logits},
        flops=products + attention + chosen,
        useful=sum(_decode(itself, MeshConfig())) / mesh.tensor,
        attention=attention,
        hbm=touched + read,
        sent=sent.in_layers(job, mesh, job.rows, times=1),
        tokens=job.rows * mesh.row_shards,
    )


def transfer_seconds(job: Workload, learns: MeshConfig, samples: MeshConfig) -> float:
    """The least time to give new weights, in the model's dtype, to all devices that sample.

    Each device of the learner sends what it has of the weights to every replica, and each device of
    the actor receives its part. They lie in one domain if one is large enough for both.
    """
    size = jax.numpy.dtype(job.model.dtype).itemsize
    total = size * sum(leaf.size for leaf in jax.tree.leaves(abstract_model(job.model)))
    experts = size * expert_elements(job.model)[0]
    expert = samples.expert or 1
    together = learns.devices + samples.devices <= job.target.domain
    rate = job.target.link if together else job.target.network
    # experts are once on all devices along ``expert``, everything else on each of them
    sends = (total - experts + experts / expert) * samples.row_shards / learns.devices
    receives = (total - experts + experts / expert) / samples.tensor
    return max(sends, receives) / rate


def padded(job: Workload, mesh: MeshConfig) -> Workload:
    """The job with its model padded for the axes ``tensor`` and ``expert`` of a mesh
    (``models.padding``).
    """
    devices = expert_devices(job.model, mesh)
    return dataclasses.replace(job, model=pad_config(job.model, mesh.tensor, devices))


def _sampling(job: Workload) -> Workload:
    """The job with weights in the dtype of its products."""
    return dataclasses.replace(
        job, model=dataclasses.replace(job.model, param_dtype=job.model.dtype)
    )


def _parameters(job: Workload, mesh: MeshConfig, whole: bool) -> float:
    """Bytes of the parameters on one device."""
    devices = abstract_mesh(mesh, job.target.device)
    return device_bytes(abstract_model(job.model, devices, whole=whole))


def _head_products(job: Workload, mesh: MeshConfig) -> int:
    """Products with the matrix of logits in an update: forward, two for gradients, and forward
    again where the logits are not kept.
    """
    targets = job.predicted // (mesh.context or 1)
    vocabulary = job.model.vocab_size // mesh.tensor
    return 3 if 4 * targets * vocabulary <= KEPT else 4


def _update_operations(job: Workload, mesh: MeshConfig) -> tuple[float, float]:
    """(Operations of an update for one row on one device, those of attention in blocks)."""
    model, context = job.model, mesh.context or 1
    made = _Forward(*(x / context for x in _forward(job, mesh)))
    attention = made.attention * costs.kernel_passes(model)
    products = _PRODUCTS * made.layers + _again(job, mesh) / context
    products += _head_products(job, mesh) * made.head
    chosen = costs.chosen_passes(model) * made.chosen
    scored = costs.forward_passes(model) * made.scored
    inverted = costs.forward_passes(model) * made.inverted
    return products + attention + chosen + scored + inverted + made.repeated, attention


def _useful(job: Workload) -> float:
    """Operations of use in an update of one row: a forward pass and two for its gradients, and one
    of the scores that keys or blocks are chosen by, each for the keys that a query sees.
    """
    made = _forward(job, MeshConfig())
    needed = costs.needed(job.model, job.context, costs.of_row(job), decode=False)
    learned = made.layers + made.head + 2 * job.context * (needed.attended + needed.chosen)
    once = 2 * job.context * (needed.scored + needed.ranked) + made.inverted
    return 3 * learned + once


def _again(job: Workload, mesh: MeshConfig) -> float:
    """Operations of products of layers that ``remat`` does again for one row on one device. The
    result of a layer's last product is not needed again.
    """
    model = job.model
    if not model.remat or model.remat_keeps == "products":
        return 0.0
    last = 2 * job.context * model.mlp_dim * model.embed_dim / mesh.tensor
    return _forward(job, mesh).layers - last * (model.num_layers - expert_layers(model))


def _cast_elements(job: Workload, mesh: MeshConfig) -> float:
    """Elements on a device of the matrices of layers without experts."""
    model = job.model
    size = jax.numpy.dtype(model.param_dtype).itemsize
    parts = mesh.tensor * (mesh.fsdp or 1)
    experts = expert_elements(model)[0] / (parts * (mesh.expert or 1))
    tables = model.vocab_size * model.embed_dim * (1 if model.tied_embeddings else 2)
    return _parameters(job, mesh, whole=False) / size - experts - tables / parts


class _Forward(NamedTuple):
    """Operations of the forward pass over one row on one device. Where rows are cut over
    ``context``, of attention those of a row of queries that are all like those of the last device.
    """

    # Of the matrices of layers, and of the matrix of logits.
    layers: float
    head: float
    # Of attention in blocks, with what is masked in them.
    attention: float
    # Of attention to chosen keys.
    chosen: float
    # Of scores that keys or blocks are chosen by.
    scored: float
    # Of inverses of triangular systems.
    inverted: float
    # Of ``layers``, what the backward pass computes once more.
    repeated: float


def _forward(job: Workload, mesh: MeshConfig) -> _Forward:
    """Operations of the forward pass over one row on one device."""
    model = job.model
    # a device computes as many pairs as it has, though of other rows
    layout = dataclasses.replace(mesh, data=1, fsdp=None, expert=None, context=None)
    size = jax.numpy.dtype(model.param_dtype).itemsize
    elements = _parameters(job, layout, whole=True) / size - costs.derived_elements(model)
    kept, computing = expert_elements(model)
    elements -= (_table(model) + kept - computing) / mesh.tensor
    # the last of a row's tokens see all of them, the mean token half of them
    needed = costs.needed(model, job.context, costs.of_row(job, mesh.context or 1), decode=False)
    # blocks that nobody sees are skipped; scores and chosen keys are computed at full width for
    # every query, and masked
    full = costs.of_layers(model, job.context, job.context, decode=False)
    head = model.vocab_size * model.embed_dim / mesh.tensor
    pairs = 2 * job.context
    return _Forward(
        layers=pairs * (elements - head + needed.derived / mesh.tensor),
        head=2 * job.predicted * head,
        attention=pairs * (needed.attended + needed.masked) / mesh.tensor,
        chosen=pairs * full.chosen / mesh.tensor,
        # every device along ``tensor`` has all heads of the indexer
        scored=pairs * (full.scored + needed.ranked / mesh.tensor),
        inverted=pairs * needed.inverted / mesh.tensor,
        repeated=pairs * needed.repeated / mesh.tensor,
    )


def _decode(job: Workload, mesh: MeshConfig) -> tuple[float, float, float]:
    """Operations of one token for every row, on one device: (of matrices, of attention in blocks,
    of scores that keys or blocks are chosen by and of attention to single keys that were chosen).
    """
    model = job.model
    size = jax.numpy.dtype(model.param_dtype).itemsize
    kept, computing = expert_elements(model)
    layout = dataclasses.replace(mesh, data=1, expert=None)
    rest = (_table(model) + kept - computing) / mesh.tensor
    active = _parameters(job, layout, whole=True) / size - rest - costs.derived_elements(model)
    needed = costs.needed(model, job.context, costs.of_decoding(job), decode=True)
    active += needed.derived / mesh.tensor
    attended = (needed.attended + needed.masked) / mesh.tensor
    of_choice = (needed.chosen + needed.ranked) / mesh.tensor + needed.scored
    pairs = 2 * job.rows
    return pairs * active, pairs * attended, pairs * of_choice


def _table(model: ModelConfig) -> int:
    """Elements of embeddings that are only looked up, which is no product."""
    return 0 if model.tied_embeddings else model.vocab_size * model.embed_dim


def _divisors(number: int) -> list[int]:
    small = [x for x in range(1, math.isqrt(number) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})
