"""The kernels that ``launch.aot kernels`` compiles: all that the programs of runs call, found by
tracing the programs for the device.

A program is traced for a mesh of devices that are not here, so that every attention call makes the
choice it would make there. The kernels are then read from the traced programs, with the shapes that
they get. A call that has no kernel there has none to compile: the dry run says why.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.ref import AbstractRef

from models.families import PRESETS
from models.model_config import ModelConfig
from models.sharding import abstract_mesh
from planner.targets import Target
from rl_code.config.read_config import build
from rl_code.run.config import RunConfig
from rl_code.run.traced import traced_programs

# The primitives of kernels: Mosaic TPU's, and Mosaic GPU's.
PRIMITIVES = ("pallas_call", "mpmd_map")
# Layers and tokens of the vocabulary that are traced: more of them call the same kernels.
_LAYERS, _VOCABULARY = 2, 512


@dataclasses.dataclass(frozen=True)
class Workload:
    """A run whose kernels are compiled."""

    name: str
    # The file in configs/, and what it is changed by: dotted keys.
    config: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The model's shape where the config's weights are not here.
    preset: str | None = None
    # The kinds of layers, as ``model.attention`` takes them; None for those of the config.
    attention: tuple[dict[str, Any], ...] | None = None
    # Devices that heads are cut over.
    tensor: int = 1
    # Devices that whole experts are cut over, each with a row of its own.
    expert: int = 1


# What a model of 8 billion parameters takes on one device: rows of 8,192 tokens in training, chunks
# of 2,048 in prefill, and 16 rows of up to 32,768 tokens that decode together.
_LARGE = {
    "limits.turns": 1,
    "limits.tokens": 8192,
    "limits.turn_tokens": 1024,
    "rollout.engine.slots": 16,
    "rollout.engine.page": 64,
    "rollout.engine.prefill_rows": 2,
    "rollout.engine.prefill_tokens": 2048,
    "rollout.engine.length": 32768,
    "rollout.engine.prompt_length": 16384,
    "rollout.engine.pages": 4096,
    "train.pack.slots": 8192,
    "train.pack.rows": 1,
    "train.pack.targets": 1024,
    "train.pack.runs": 12,
    "train.micro_batches": 1,
}


def _large(name: str, **settings: Any) -> Workload:
    method = {"name": name, **settings}
    given = ("quickstart", _LARGE, "qwen3-8b", (method,))
    return Workload(f"8B, {name}", *given)


def _documents(name: str, **settings: Any) -> Workload:
    """The same with documents, whose pages end in padding."""
    plain = _large(name, **settings)
    changes = {**plain.changes, "documents": {}}
    return dataclasses.replace(plain, name=f"{plain.name}, documents", changes=changes)


def _states(**settings: Any) -> Workload:
    """The same with layers that keep states, every second one."""
    plain = _large("gated_delta", **settings)
    return dataclasses.replace(plain, attention=(*(plain.attention or ()), {"name": "dense"}))


def _latent(tensor: int) -> Workload:
    """DeepSeek-V3, whose heads are cut over some devices."""
    name = f"671B, mla over {tensor}"
    return Workload(name, "quickstart", _LARGE, "deepseek-v3", tensor=tensor)


def _experts(tensor: int) -> Workload:
    """The same with a mixture of experts, each cut over some devices."""
    plain = _large("dense")
    name = f"30B-A3B, experts over {tensor}"
    return dataclasses.replace(plain, name=name, preset="qwen3-30b-a3b", tensor=tensor)


def _whole_experts(expert: int) -> Workload:
    """The same with some of the experts on each device."""
    plain = _experts(tensor=1)
    changes = {**plain.changes, "train.pack.rows": expert}
    name = f"30B-A3B, whole experts on {expert}"
    return dataclasses.replace(plain, name=name, changes=changes, expert=expert)


def _paged(name: str, page: int) -> Workload:
    """The same with other pages, and the method's own settings."""
    plain = _large(name)
    pages = {"page": page, "view_block": page, "pages": 4096 * 64 // page}
    changes = {**plain.changes, **{f"rollout.engine.{name}": x for name, x in pages.items()}}
    return dataclasses.replace(plain, name=f"{plain.name}, pages of {page}", changes=changes)


WORKLOADS = (
    Workload("quickstart", "quickstart"),
    Workload("smollm2_mbpp", "smollm2_mbpp"),
    Workload("own_model", "own_model", preset="qwen3-8b"),
    _large("dense"),
    _large("window", window=512),
    _large("nsa"),
    _large("moba", block=64, picks=16),
    # the paper's blocks of 512, which are pages of the cache too
    _paged("moba", page=512),
    _large("gated_documents"),
    # as Qwen3-Next and Qwen3.5
    _states(key_heads=16, value_heads=32, key_size=128, value_size=128),
    _latent(tensor=8),
    _documents("dense"),
    _documents("nsa"),
    _experts(tensor=1),
    _experts(tensor=4),
    _whole_experts(8),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as a traced program calls it."""

    # The name that it has in a profile too.
    name: str
    # Those of its arguments that are not integers, as "bf16[2,128,4,128]".
    shapes: str
    # The workloads and programs that call it, as "quickstart: decode".
    callers: tuple[str, ...]
    # A function of arrays of ``arguments``, which is this one call.
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    # Operations of its products, which kernels for TPU say of themselves; None elsewhere.
    flops: int | None = None
    # Threads of a thread block on GPU; None elsewhere.
    threads: int | None = None


def kernels(target: Target, workloads: tuple[Workload, ...] = WORKLOADS) -> list[Kernel]:
    """Every different kernel call of the workloads on a target, in the order of the workloads."""
    found: dict[tuple[str, ...], Kernel] = {}
    for workload in workloads:
        config, model = settings(workload)
        mesh = abstract_mesh(config.mesh, target.device)
        programs = traced_programs(config, model, mesh)
        for program, traced in programs.items():
            caller = f"{workload.name}: {program}"
            for equation in calls(traced.jaxpr.jaxpr):
                kernel = _kernel(equation, caller)
                # kernels of one name and shape may differ in what is static, as a window
                key = (kernel.name, *map(str, kernel.arguments), *map(str, _inside(equation)))
                known = found.get(key, dataclasses.replace(kernel, callers=()))
                callers = dict.fromkeys((*known.callers, caller))
                found[key] = dataclasses.replace(known, callers=tuple(callers))
    return list(found.values())


def settings(workload: Workload) -> tuple[RunConfig, ModelConfig]:
    """(the config of a workload with its derived sizes, its model in bfloat16 with few layers)."""
    changes = {
        "mesh": {"data": 1, "tensor": workload.tensor, "expert": workload.expert},
        "model.dtype": "bfloat16",
        "rollout.dtype": "bfloat16",
        **({} if workload.attention is None else {"model.attention": workload.attention}),
        **workload.changes,
    }
    config = changed(workload.config, changes)
    shape = PRESETS[workload.preset] if workload.preset else config.model.shape()
    methods = config.model.methods() or shape.attention
    moe = shape.moe
    if moe is not None and moe.first_dense:
        moe = dataclasses.replace(moe, first_dense=len(methods))
    return config, dataclasses.replace(
        shape,
        moe=moe,
        dtype="bfloat16",
        param_dtype="bfloat16",
        attention=methods,
        num_layers=_LAYERS * len(methods),
        vocab_size=_VOCABULARY,
        embed_dim=min(shape.embed_dim, 1024),
        mlp_dim=min(shape.mlp_dim, 1024),
    )


def changed(name: str, changes: Mapping[str, Any]) -> RunConfig:
    """The config configs/<name>.py with other values for some dotted keys."""
    given = importlib.import_module(f"configs.{name}").get_config().to_dict()
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = given
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return build(RunConfig, given)


def calls(jaxpr: Jaxpr, around: str = "") -> Iterator[JaxprEqn]:
    """The kernel calls of a program, those inside of loops and other calls too.

    around: the function that the program is, after which a kernel without a name is called.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRIMITIVES:
            if equation.params.get("name", "") is None:
                equation = equation.replace(params=equation.params | {"name": around})
            yield equation
            continue
        inner = equation.params.get("name", around)
        for program in _inside(equation):
            yield from calls(program.jaxpr if isinstance(program, ClosedJaxpr) else program, inner)


def _inside(equation: JaxprEqn) -> list[ClosedJaxpr | Jaxpr]:
    """The programs that are parameters of an equation, such as the body of a loop."""

    def is_program(x: Any) -> bool:
        return isinstance(x, ClosedJaxpr | Jaxpr)

    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
    return [x for x in parameters if is_program(x)]


def _kernel(equation: JaxprEqn, caller: str) -> Kernel:
    # an array that a kernel reads through several index maps is given several times, and lies in
    # memory once
    given = list(dict.fromkeys(equation.invars))
    avals: list[Any] = [x.aval for x in given]
    arguments = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
    floats = [x for x in arguments if x.dtype.kind != "i"]
    shapes = dict.fromkeys(f"{_short(x)}[{','.join(map(str, x.shape))}]" for x in floats)
    name = str(equation.params.get("name") or equation.params["name_and_src_info"].name)
    cost = equation.params.get("cost_estimate")
    flops = None if cost is None else int(cost.flops)
    places = tuple(given.index(x) for x in equation.invars)
    function = functools.partial(_call, equation, places)
    meshes = equation.params.get("meshes")
    # a "thread" of Mosaic GPU is a warpgroup
    threads = None if meshes is None else (meshes[0].num_threads or 1) * 128
    return Kernel(name, " ".join(shapes), (caller,), function, arguments, flops, threads)


def _call(equation: JaxprEqn, places: tuple[int, ...], *arguments: jax.Array) -> Any:
    # an array that a kernel writes to is a reference of the traced program
    given = [
        jax.new_ref(x) if isinstance(variable.aval, AbstractRef) else x
        for variable, x in zip(dict.fromkeys(equation.invars), arguments, strict=True)
    ]
    return equation.primitive.bind(*(given[at] for at in places), **equation.params)


def _short(x: jax.ShapeDtypeStruct) -> str:
    return str(x.dtype).replace("bfloat", "bf").replace("float", "f")
