"""Ranking and display of the planned meshes that fit: table and numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import rich.table

from models.padding import pad_config
from models.sharding import MESH_AXES, MeshConfig
from planner.collectives import Kind
from planner.workload import Estimate, Workload, expert_devices

# Part of a device's memory that a plan may fill. The rest is a reserve by judgement, not measured:
# a driver and its communicators take 1 to 2 GB of a GPU, allocators leave fragments. JAX takes 75 %
# unless XLA_PYTHON_CLIENT_MEM_FRACTION says more.
FULL = 0.92


def named_mesh(text: str, devices: int) -> MeshConfig:
    """The mesh that a text such as "fsdp=9,tensor=8" names.

    Raises ValueError where it names none, or one of other devices.
    """
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    known = [field.name for field in dataclasses.fields(MeshConfig)]
    if not set(parts) <= set(known) or not all(size.isdecimal() for size in parts.values()):
        raise ValueError(f"must name sizes of {', '.join(known)}, as tensor=8")
    sizes = {name: int(size) for name, size in parts.items()}
    if math.prod(sizes.values()) != devices:
        raise ValueError(f"must be a mesh of {devices} devices")
    return MeshConfig(**sizes)


def sorted_estimates(
    job: Workload,
    estimate: Callable[[Workload, MeshConfig], Estimate],
    meshes: Iterable[MeshConfig],
) -> tuple[list[Estimate], dict[str, list[str]]]:
    """(estimates of the meshes that fit, the fastest first; the others by what is against them)."""
    fitting: list[Estimate] = []
    others: dict[str, list[str]] = {}
    room = FULL * job.target.memory
    for mesh in meshes:
        try:
            made = estimate(job, mesh)
        except ValueError as error:
            others.setdefault(_reason(error), []).append(words(mesh))
            continue
        if made.total_bytes > room:
            reason = f"more than {room / 1e9:,.0f} GB on a device"
            others.setdefault(reason, []).append(f"{words(mesh)} ({made.total_bytes / 1e9:,.0f})")
        else:
            fitting.append(made)
    # among equals the one that fills less memory
    return sorted(fitting, key=lambda x: (x.bound(job.target), x.total_bytes)), others


def _reason(error: ValueError) -> str:
    """Reason why a mesh does not do, for all meshes with the same reason."""
    cut = re.search(r"(\d+) must be divisible by (\w+)=\d+", str(error))
    return f"{cut[1]} of the model does not divide by {cut[2]}" if cut else str(error)


def table(role: str, job: Workload, estimates: Sequence[Estimate]) -> rich.table.Table:
    """One line per mesh: memory by part, what is sent, and the times that follow."""
    target = job.target
    title = (
        f"{role}: one GRPO step of {job.tokens:,} tokens in rows of {job.context:,}"
        if role == "learner"
        else f"{role}: one token for each of {job.rows} rows of up to {job.context:,} tokens"
    )
    found = rich.table.Table(title=f"{title}; {job.name} on {target.name}", title_justify="left")
    found.add_column("mesh")
    found.add_column("GB on a device", overflow="fold")
    found.add_column("TFLOP", justify="right")
    found.add_column("sent, GB", overflow="fold")
    found.add_column("ms at peak rates", overflow="fold")
    found.add_column("MFU at most", justify="right")
    found.add_column("tokens/s of a device at most", justify="right")
    found.add_column("from", overflow="fold")
    for estimate in estimates:
        parts = {"all": estimate.total_bytes, **estimate.memory}
        host = {f"of the host: {name}": size for name, size in estimate.host.items()}
        sent = {_kind_words(kind): size for kind, size in estimate.sent.items()}
        times = estimate.seconds(target)
        found.add_row(
            words(estimate.mesh),
            "\n".join(f"{name} {size / 1e9:,.2f}" for name, size in (parts | host).items()),
            f"{estimate.flops / 1e12:,.2f}",
            "\n".join(f"{name} {size / 1e9:,.3f}" for name, size in sent.items()) or "nothing",
            "\n".join(f"{name} {1e3 * time:,.2f}" for name, time in times.items()),
            f"{100 * estimate.mfu(target):.0f} %",
            f"{estimate.tokens_per_second(target):,.0f}",
            estimate.source,
        )
    if not estimates:
        found.add_row("none fits")
    return found


def to_json(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON's types."""
    sent = [{**dataclasses.asdict(kind), "bytes": x} for kind, x in estimate.sent.items()]
    return dataclasses.asdict(dataclasses.replace(estimate, sent={})) | {"sent": sent}


def from_json(found: dict[str, Any]) -> Estimate:
    """The estimate that ``to_json`` has written."""
    sent = {
        Kind(x["operation"], x["devices"], x["leaves_domain"]): x["bytes"] for x in found["sent"]
    }
    return Estimate(**found | {"mesh": MeshConfig(**found["mesh"]), "sent": sent})


def words(mesh: MeshConfig) -> str:
    """A mesh by its axes, as "data 2 x fsdp 4 x tensor 8"."""
    sizes = dict(zip(MESH_AXES, mesh.sizes, strict=True))
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def derived(job: Workload, estimate: Estimate) -> dict[str, Any]:
    """Times and rates that follow from an estimate, as JSON's types."""
    return {
        "seconds": estimate.seconds(job.target),
        "mfu": estimate.mfu(job.target),
        "tokens_per_second": estimate.tokens_per_second(job.target),
    }


def config_flags(job: Workload, learner: MeshConfig, actor: MeshConfig) -> list[str]:
    """The plan as flags that set keys of a config: of learner and actors in processes of their own.

    Sizes that a mesh axis does not divide are padded, as the arithmetic counts them.
    """
    model = job.model
    keys: dict[str, Any] = {
        **{f"mesh.{name}": size for name, size in zip(MESH_AXES, learner.sizes, strict=True)},
        **{f"rollout.mesh.{name}": size for name, size in zip(MESH_AXES, actor.sizes, strict=True)},
        "model.dtype": model.dtype,
        "model.remat": model.remat,
        "model.remat_keeps": model.remat_keeps,
        "model.offload_activations": model.offload_activations,
        "train.optimizer.offload": job.offload_moments,
        "rollout.engine.slots": job.rows,
        "limits.tokens": job.context,
        "train.pack.prompt_slots": job.prompts or False,
    }
    if model.moe is not None and model.moe.fold:
        keys |= {"model.fold_experts": True, "model.sequence_parallel": True}
    tensor = math.lcm(learner.tensor, actor.tensor)
    if pad_config(model, tensor).unpadded is not None:
        keys["model.pad_for"] = tensor
    if model.moe is not None:
        experts = math.lcm(*(expert_devices(model, mesh) for mesh in (learner, actor)))
        if model.moe.experts % experts:
            keys["model.pad_experts_for"] = experts
    # left out: what a config has anyway
    plain = {name: value for name, value in keys.items() if value is not False}
    sizes = {f"{where}.{name}" for where in ("mesh", "rollout.mesh") for name in MESH_AXES[1:]}
    return [
        f"--config.{name}={value}"
        for name, value in plain.items()
        if name not in sizes or value != 1 or name.endswith(".tensor")
    ]


def _kind_words(kind: Kind) -> str:
    where = ", network" if kind.leaves_domain else ""
    return f"{kind.operation} of {kind.devices}{where}"
