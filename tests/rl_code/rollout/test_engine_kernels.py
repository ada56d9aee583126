"""The sampler's programs for accelerators have the kernels in them, on every mesh."""

from __future__ import annotations

import dataclasses

import pytest
from jax.sharding import AbstractDevice

from attention.calls import CallShape
from attention.implementations import implementations
from attention.methods.api import METHODS
from attention.methods.window import Window
from configs import quickstart
from models.model_config import MoE
from models.sharding import MeshConfig, abstract_mesh, make_mesh, use_mesh
from models.transformer import abstract_model
from pallas_kernels import choice
from planner.targets import TARGETS
from rl_code.config.read_config import build
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.run import attention_calls as attention_calls_module
from rl_code.run.attention_calls import expert_calls, log_attention
from rl_code.run.config import RunConfig
from tests.models.small import small_config
from tests.rl_code.rollout import small

ENGINE = EngineConfig(
    slots=4,
    page=64,
    pages=64,
    prefill_rows=2,
    prefill_tokens=128,
    prompt_length=512,
    length=1024,
    decode_steps=4,
    cache_dtype="bfloat16",
)
METHOD = {"window": Window(128)}
# (data, tensor): with heads on several devices, and with all on one
MESHES = ((2, 2), (4, 1))
DEVICES = {
    "v5p": AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu"),
    "h100": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"),
    "gb200": AbstractDevice(device_kind="NVIDIA GB200", num_cores=None, platform="gpu"),
}
# What a call of a kernel is in a lowered program.
CALLS = {"tpu": "custom_call @tpu_custom_call", "gpu": "custom_call @mosaic_gpu"}
# Of the last layer prefill needs only the keys, so its attention is left out.
LAYERS = {"prefill": 2, "decode": 1}
# Of contexts with documents on meshes of both axes.
LONGEST_DOCUMENT = {(2, 2): 256}
# (method, data, tensor, device): each method with each mesh, once on a TPU and once on a GPU. Methods
# with projections of their own have no kernels.
COMBINATIONS = [
    (name, *mesh, "v5p" if (row + column) % 2 == 0 else ("h100", "gb200")[row // 2 % 2])
    for row, name in enumerate(name for name in METHODS if not METHODS[name].mixes)
    for column, mesh in enumerate(MESHES)
]


def method(name: str):
    found = METHOD.get(name) or METHODS[name]()
    # a page is one block
    return dataclasses.replace(found, block=ENGINE.page) if name == "moba" else found


def model_config(name: str, layers: int):
    sizes = dict(embed_dim=128, mlp_dim=128, num_layers=layers, num_heads=8, num_kv_heads=4)
    types = dict(dtype="bfloat16", param_dtype="bfloat16")
    return small_config(**sizes, **types, head_dim=128, attention=(method(name),))


def programs(name: str, data: int, tensor: int, device: AbstractDevice) -> dict[str, str]:
    """The lowered programs "prefill" and "decode"."""
    mesh = abstract_mesh(MeshConfig(data, tensor), device)
    longest = LONGEST_DOCUMENT.get((data, tensor))
    shapes = dataclasses.replace(ENGINE, longest_document=longest)
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    found = {}
    for phase, layers in LAYERS.items():
        config = model_config(name, layers)
        engine = Engine(config, shapes, SamplingConfig(), (0,), mesh)
        traced = engine.tracers(abstract_model(config, mesh))[phase]()
        with use_mesh(mesh):
            found[phase] = traced.lower(lowering_platforms=(platform,)).as_text()
    return found


def expected(name: str, tensor: int, platform: str) -> dict[str, int]:
    """How many kernels a layer calls in a program, by what ``implementations`` says."""
    shape = CallShape(
        num_heads=8 // tensor,
        num_kv_heads=4 // tensor,
        head_dim=128,
        train_rows=1,
        train_tokens=128,
        prefill_rows=ENGINE.prefill_rows,
        prefill_tokens=ENGINE.prefill_tokens,
        decode_rows=ENGINE.slots,
        page=ENGINE.page,
        pages=ENGINE.table,
    )
    rows = implementations([method(name)], shape, "bfloat16", platform)
    kernels = [row for row in rows if row.implementation != "xla"]
    return {phase: sum(row.phase == phase for row in kernels) for phase in ("prefill", "decode")}


def assert_kernels(found: dict[str, str], wanted: dict[str, int], platform: str) -> None:
    """Every call of the layer that attends is a kernel."""
    for phase in LAYERS:
        assert wanted[phase] >= 1
        assert found[phase].count(CALLS[platform]) >= wanted[phase], (phase, wanted)


@pytest.mark.parametrize("name, data, tensor, target", COMBINATIONS)
@pytest.mark.quick(first=1)
def test_prefill_and_decode_have_the_kernels_on_every_mesh(name, data, tensor, target):
    device = DEVICES[target]
    wanted = expected(name, tensor, TARGETS[target].kind)
    assert_kernels(programs(name, data, tensor, device), wanted, device.platform)


def test_the_mesh_says_for_which_platform_a_program_is():
    assert choice.here() == "cpu"
    for target, device in DEVICES.items():
        with use_mesh(abstract_mesh(MeshConfig(1, 1), device)):
            assert choice.here() == TARGETS[target].kind


def test_a_call_without_a_kernel_on_an_accelerator_is_a_warning(caplog):
    config = build(RunConfig, quickstart.get_config("smoke"))
    with caplog.at_level("DEBUG", logger="absl"):
        log_attention(config, config.model.shape(), "cpu")
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    caplog.clear()
    # the quickstart is in float32, for which GPUs have no kernel
    log_attention(config, config.model.shape(), "hopper")
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "attention without a kernel: " in caplog.text
    assert "the dtypes ['float32'] must be one of ('bfloat16',)" in caplog.text


@pytest.mark.parametrize(("role", "heads"), [("all", 4), ("actor", 2), ("prefill", 2)])
def test_the_calls_of_a_role_are_those_of_the_mesh_that_it_samples_on(monkeypatch, role, heads):
    given = quickstart.get_config("smoke")
    given.rollout.mesh = dict(data=1, tensor=2)
    config = build(RunConfig, given)
    shapes = []

    def seen(methods, shape, *how):
        shapes.append(shape)
        return implementations(methods, shape, *how)

    monkeypatch.setattr(attention_calls_module, "implementations", seen)
    attention_calls_module.attention_calls(config, small_config(num_heads=4), "hopper", role)
    train, sample = shapes
    assert (train.num_heads, sample.num_heads) == (4, heads)


def test_experts_without_a_kernel_on_an_accelerator_are_a_warning(caplog):
    config = build(RunConfig, quickstart.get_config("smoke"))
    model = small_config(moe=MoE(experts=4, active=2, mlp_dim=8), dtype="float32")
    assert expert_calls(config, small_config()) == []
    for platform, implementation in {"cpu": "cpu", "tpu": "tpu", "hopper": "xla"}.items():
        rows = expert_calls(config, model, platform)
        assert [row.phase for row in rows] == ["train", "prefill", "decode"]
        assert {row.implementation for row in rows} == {implementation}
    log_attention(config, model, "hopper")
    assert caplog.text.count("experts without a kernel: ") == 3
    assert "the dtypes ['float32'] must be one of ('bfloat16', 'float16')" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("top", [{}, {"top_k": 5, "top_p": 0.9}])
def test_no_exchange_in_the_decode_loop_waits_for_another_shard_of_the_rows(top):
    """A collective-permute is joined by the whole mesh, and shards leave the loop one by one."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    model = dataclasses.replace(small.MODEL, num_layers=1)
    engine = Engine(model, small.ENGINE, SamplingConfig(**top), (small.STOP,), mesh)
    decode = engine.traced(small.model_on(mesh, model))["decode"]
    text = decode.lower().compile().as_text()
    assert "all-reduce" in text and "collective-permute" not in text
    assert "replica_groups={}" not in text
