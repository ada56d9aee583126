"""launch.plan: what its arithmetic says of meshes, beside what compiled programs say."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import pytest

from configs import own_model
from models.families import PRESETS
from models.model_config import REMAT_KEEPS
from models.sharding import MeshConfig
from planner import arithmetic, compiled, table
from planner.collectives import Kind
from planner.targets import TARGETS
from planner.workload import Workload
from rl_code.config import read_config
from rl_code.config.read_config import build
from rl_code.run.config import RunConfig
from tests import programs
from tests.models.small import small_config

SMALL = small_config(
    vocab_size=512, embed_dim=128, mlp_dim=256, num_layers=6, num_heads=8, num_kv_heads=8,
    head_dim=16, remat=True,
)  # fmt: skip
JOB = Workload("small", SMALL, TARGETS["h100"], tokens=8 * 256, context=256, rows=4)
LARGE = dataclasses.replace(
    JOB, model=dataclasses.replace(PRESETS["qwen3-32b"], dtype="bfloat16"), tokens=2**20, context=8192
)  # fmt: skip


def test_every_mesh_of_the_devices_is_looked_at_once():
    found = list(arithmetic.meshes(8, fsdp=True))
    assert len(set(found)) == len(found) == 10
    assert all(mesh.devices == 8 for mesh in found)
    assert all(mesh.fsdp is None for mesh in arithmetic.meshes(8, fsdp=False))
    found = list(arithmetic.meshes(8, fsdp=True, experts=True))
    assert len(set(found)) == len(found) == 20
    assert all(mesh.devices == 8 for mesh in found)


def test_parameters_and_moments_fall_with_the_devices_that_cut_them():
    one = arithmetic.learner(LARGE, MeshConfig())
    eight = arithmetic.learner(LARGE, MeshConfig(fsdp=8))
    both = arithmetic.learner(LARGE, MeshConfig(fsdp=4, tensor=2))
    for part in ("weights", "moments", "gradients"):
        assert eight.memory[part] == pytest.approx(one.memory[part] / 8, rel=1e-3)
        assert both.memory[part] == pytest.approx(one.memory[part] / 8, rel=1e-3)
    assert one.memory["moments"] == 2 * one.memory["weights"] == 2 * one.memory["gradients"]
    # 32.8 billion parameters in float32
    assert one.memory["weights"] == pytest.approx(4 * 32.76e9, rel=0.01)


def test_the_work_of_a_step_is_the_same_on_every_mesh():
    made = [
        arithmetic.learner(LARGE, mesh)
        for mesh in arithmetic.meshes(8, fsdp=True)
    ]  # fmt: skip
    for estimate in made:
        assert estimate.flops * 8 == pytest.approx(made[0].flops * 8, rel=1e-3)
    # six operations for each parameter and token, and attention's, of whose 4.5 forward passes two
    # are of use; half of the tokens have logits
    useful = 8 * (made[0].useful - 3 / 4.5 * made[0].attention)
    assert useful == pytest.approx(6 * 2**20 * (32.76e9 - 1.5 * 151_936 * 5120), rel=0.01)


def test_of_experts_only_the_active_ones_compute():
    shape = PRESETS["qwen3-30b-a3b"]
    job = dataclasses.replace(LARGE, model=dataclasses.replace(shape, dtype="bfloat16"))
    made = arithmetic.learner(job, MeshConfig(fsdp=8))
    assert 8 * made.memory["weights"] == pytest.approx(4 * 30.5e9, rel=0.01)
    # 3.3 billion active parameters, of which embeddings are only looked up, and of which half of
    # the tokens have logits
    active = 3.35e9 - 1.5 * shape.vocab_size * shape.embed_dim
    useful = 8 * (made.useful - 3 / 4.5 * made.attention)
    assert useful == pytest.approx(6 * 2**20 * active, rel=0.02)
    few, many = (
        arithmetic.actor(dataclasses.replace(job, rows=rows, context=128), MeshConfig())
        for rows in (2, 512)
    )
    # two rows read at most 16 of 128 experts, many rows read nearly all
    assert few.hbm < 0.25 * few.memory["weights"] and many.hbm > 0.95 * many.memory["weights"]


def test_experts_lie_on_some_devices_and_tokens_travel_to_them():
    shape = dataclasses.replace(PRESETS["qwen3-30b-a3b"], dtype="bfloat16", remat=True)
    job = dataclasses.replace(LARGE, model=shape, tokens=144 * 8192)
    one, data, eight = (
        arithmetic.learner(job, mesh)
        for mesh in (MeshConfig(), MeshConfig(data=8), MeshConfig(expert=8))
    )
    experts = 4 * 3 * 2048 * 768 * 128 * 48
    assert eight.memory["weights"] == one.memory["weights"] - experts * 7 / 8
    assert eight.flops == data.flops and eight.useful == data.useful
    # eight pairs of each token, there and back in three passes over 48 layers, in two bytes
    exchange = Kind("ragged-all-to-all", 8, False)
    assert eight.sent[exchange] == 7 / 8 * 18 * 8192 * 8 * 48 * 6 * 2048 * 2
    # only what is not cut is summed
    kind = Kind("all-reduce", 8, False)
    assert eight.sent[kind] == data.sent[kind] - 7 / 8 * 2 * experts
    fold = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, fold=True))
    mesh = MeshConfig(expert=9, tensor=8)
    folded = arithmetic.learner(dataclasses.replace(job, model=fold), mesh)
    unfolded = arithmetic.learner(job, dataclasses.replace(mesh, expert=8, data=9))
    # a token is sent by one device of eight
    assert folded.sent[Kind("ragged-all-to-all", 72, True)] == pytest.approx(
        71 / 72 * 16 * 8192 * 48 * 6 * 2048 * 2
    )
    assert arithmetic.padded(dataclasses.replace(job, model=fold), mesh).model.moe.slots == 144
    # two experts for each device, or the 64th part of all
    assert folded.memory["weights"] == unfolded.memory["weights"]


def test_long_rows_are_cut_and_their_keys_go_round():
    job = dataclasses.replace(LARGE, context=2**17)
    rows, cut = (arithmetic.learner(job, m) for m in (MeshConfig(data=8), MeshConfig(context=8)))
    assert cut.useful == rows.useful
    # the last device's tokens see 15/16 of a row, the mean token sees half of it
    assert cut.attention == rows.attention * 15 / 8
    assert cut.flops - cut.attention == rows.flops - rows.attention
    # but for the matrix of logits and its gradient, which every device has
    whole, own = (x.memory["working"] for x in (rows, cut))
    assert whole / 8 <= own < whole / 8 + 6 * job.model.vocab_size * job.model.embed_dim
    # eight rows, whose eight stretches of eight key/value heads of 128 each device passes on
    sent = cut.sent[Kind("collective-permute", 8, False)]
    # forward and back, in two bytes, and their gradients in four; once more forward with remat
    assert sent == 64 * 8 * 2**17 * 2 * 8 * 128 * (2 * 2 + 4)
    again = dataclasses.replace(job, model=dataclasses.replace(job.model, remat=True))
    again = arithmetic.learner(again, MeshConfig(context=8)).sent
    assert again[Kind("collective-permute", 8, False)] == 64 * 8 * 2**17 * 2 * 8 * 128 * (3 * 2 + 4)
    found = list(arithmetic.meshes(8, fsdp=True, context=True))
    assert len(set(found)) == len(found) == 20
    assert all(mesh.devices == 8 for mesh in found)
    with pytest.raises(ValueError, match="rows of 8192 tokens do not divide by context"):
        arithmetic.learner(LARGE, MeshConfig(context=3))


# (layers, rows) of an update of 1.72 billion parameters, rows of 8,192 tokens with
# 4,096 targets: (TFLOP of products, GB beside weights and moments) of the program that was compiled
# for one H100. With four layers the matrices were not yet cast before the micro-batches.
COMPILED = {(28, 4): (387.23, 13.465), (4, 4): (90.37, None)}


@pytest.mark.parametrize("case", COMPILED)
def test_work_and_memory_are_those_of_the_program_for_an_h100(case):
    layers, rows = case
    products, size = COMPILED[case]
    own = dict(embed_dim=2048, mlp_dim=6144, num_layers=layers, num_heads=16)
    model = dataclasses.replace(
        PRESETS["qwen3-8b"], **own, tied_embeddings=True, dtype="bfloat16", remat=True
    )
    job = dataclasses.replace(LARGE, model=model, tokens=rows * 8192)
    made = arithmetic.learner(job, MeshConfig())
    assert 1e-12 * (made.flops - made.attention) == pytest.approx(products, rel=0.01)
    if size is not None:
        beside = made.total_bytes - made.memory["weights"] - made.memory["moments"]
        assert 1e-9 * beside == pytest.approx(size, rel=0.05)


def test_what_remat_keeps_takes_memory_and_saves_work():
    model = dataclasses.replace(LARGE.model, remat=True)
    made = {}
    for keeps in REMAT_KEEPS:
        own = dataclasses.replace(model, remat_keeps=keeps)
        made[keeps] = arithmetic.learner(dataclasses.replace(LARGE, model=own), MeshConfig(fsdp=8))
    nothing, attention, products = made.values()
    assert nothing.flops > attention.flops > products.flops
    assert nothing.attention > attention.attention == products.attention
    added = attention.memory["working"] - nothing.memory["working"]
    # results of 64 heads of 128 elements in 2 bytes, of 64 layers and 8,192 tokens
    assert added == 64 * 128 * 2 * 64 * 8192
    assert products.memory["working"] > attention.memory["working"]


def test_what_leaves_the_domain_goes_through_the_network():
    inside = arithmetic.learner(LARGE, MeshConfig(data=2, tensor=4))
    outside = arithmetic.learner(LARGE, MeshConfig(data=2, tensor=8))
    assert not any(kind.leaves_domain for kind in inside.sent)
    assert {kind.operation: kind.leaves_domain for kind in outside.sent if kind.devices == 2} == {
        "all-reduce": True
    }
    seconds = outside.seconds(TARGETS["h100"])
    assert seconds["network"] > 0.0 and inside.seconds(TARGETS["h100"])["network"] == 0.0
    assert outside.bound(TARGETS["h100"]) == max(seconds.values())


def test_a_mesh_that_cannot_cut_the_model_or_the_rows_is_named_with_the_reason():
    fitting, others = table.sorted_estimates(
        dataclasses.replace(LARGE, tokens=144 * LARGE.context),
        arithmetic.learner,
        [MeshConfig(fsdp=9), MeshConfig(data=5), MeshConfig(), MeshConfig(fsdp=8, tensor=8)],
    )
    assert [x.mesh for x in fitting] == [MeshConfig(fsdp=8, tensor=8)]
    assert {tuple(cut) for cut in others.values()} >= {("fsdp 9",), ("data 5",)}
    assert "5120 of the model does not divide by fsdp" in others
    assert "more than 78 GB on a device" in others


@pytest.mark.parametrize("estimate", [arithmetic.learner, arithmetic.actor])
def test_a_padded_model_does_more_work_of_which_no_more_is_of_use(estimate):
    """64 heads become 72; of both on eight devices, nothing is padded."""
    eight, all_devices = (estimate(LARGE, MeshConfig(tensor=n)) for n in (8, 72))
    assert 8 * eight.useful == pytest.approx(72 * all_devices.useful)
    ratio = eight.useful / eight.flops
    assert 0.8 * ratio < all_devices.useful / all_devices.flops < 0.95 * ratio
    # key/value heads stand on every device; with them 2 % more weights
    assert 72 * all_devices.memory["weights"] > 8 * eight.memory["weights"]


def test_weights_go_over_links_within_a_domain_and_over_the_network_beyond():
    small = dataclasses.replace(LARGE, target=TARGETS["gb200"])
    within = arithmetic.transfer_seconds(small, MeshConfig(fsdp=8), MeshConfig(tensor=8))
    beyond = arithmetic.transfer_seconds(small, MeshConfig(fsdp=64), MeshConfig(tensor=16))
    size = 2 * 32.76e9
    assert within == pytest.approx(size / 8 / 900e9, rel=0.01)
    assert beyond == pytest.approx(size / 16 / 50e9, rel=0.01)


def test_what_waits_on_the_host_is_counted_apart():
    mesh = MeshConfig(fsdp=4, tensor=2)
    model = dataclasses.replace(LARGE.model, remat=True)
    plain = arithmetic.learner(dataclasses.replace(LARGE, model=model), mesh)
    model = dataclasses.replace(model, offload_activations=True)
    job = dataclasses.replace(LARGE, model=model, offload_moments=True)
    made = arithmetic.learner(job, mesh)
    assert plain.host == {} and made.host["moments"] == plain.memory["moments"]
    kept = made.host["hidden states"]
    assert kept > 0 and plain.memory["working"] - made.memory["working"] == pytest.approx(kept)
    assert made.total_bytes < plain.total_bytes - 0.9 * sum(made.host.values())


def test_a_plan_is_given_as_keys_of_a_config():
    learner, actor = MeshConfig(fsdp=3, tensor=24), MeshConfig(tensor=72)
    job = dataclasses.replace(LARGE, offload_moments=True)
    given = read_config.complete(RunConfig, own_model.get_config())
    for flag in table.config_flags(job, learner, actor):
        key, _, value = flag.removeprefix("--config.").partition("=")
        *sections, name = key.split(".")
        section = given
        for part in sections:
            section = section[part]
        section[name] = {"True": True}.get(value, int(value) if value.isdigit() else value)
    config = build(RunConfig, given)
    assert config.mesh.sizes == learner.sizes and config.rollout.mesh.sizes == actor.sizes
    # 64 heads do not divide by 72
    assert (config.model.pad_for, config.model.dtype) == (72, "bfloat16")
    assert config.train.optimizer.offload and config.rollout.engine.slots == job.rows
    assert config.limits.tokens == job.context
    flags = table.config_flags(LARGE, MeshConfig(fsdp=8), MeshConfig(tensor=8))
    assert not any("pad" in flag or "offload" in flag for flag in flags)


def test_estimates_survive_json():
    made = arithmetic.learner(LARGE, MeshConfig(fsdp=4, tensor=2))
    assert table.from_json(json.loads(json.dumps(table.to_json(made)))) == made


@pytest.fixture
def here(monkeypatch):
    """Programs are compiled for the devices that are here."""

    def topology(**_):
        return types.SimpleNamespace(devices=jax.devices())

    monkeypatch.setattr(compiled.topologies, "get_topology_desc", topology)
    settings = compiled.settings

    def changed(job, estimate):
        config = settings(job, estimate)
        engine = dataclasses.replace(config.rollout.engine, cache_dtype="float32")
        return dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, engine=engine)
        )

    monkeypatch.setattr(compiled, "settings", changed)


@pytest.mark.long
def test_the_compiled_step_does_about_the_work_that_arithmetic_says(here):
    estimate = arithmetic.learner(JOB, MeshConfig(data=2, tensor=2, fsdp=2))
    found = compiled.compiled(JOB, estimate)
    assert found.source.startswith("compiled whole in ")
    # Attention in XLA is counted as products here and by arithmetic too.
    matrices = estimate.flops - estimate.attention
    assert 0.8 * matrices < found.flops - found.attention < 1.6 * matrices
    # sums over tensor, and parameters that are gathered and gradients that are summed
    assert {kind.operation for kind in found.sent} >= {"all-reduce", "all-gather"}
    assert found.memory["weights"] == estimate.memory["weights"]
    assert found.memory["gradients, activations"] > estimate.memory["gradients"]


@pytest.mark.long
def test_the_compiled_decode_step_does_about_the_work_that_arithmetic_says(here, monkeypatch):
    monkeypatch.setattr(compiled, "_FEW", (1, 2))
    estimate = arithmetic.actor(JOB, MeshConfig(data=4, tensor=2))
    found = compiled.compiled(JOB, estimate)
    assert found.source.startswith("compiled with 1 and 2 periods of layers")
    matrices = estimate.flops - estimate.attention
    assert 0.8 * matrices < found.flops - found.attention < 1.6 * matrices
    assert {kind.operation for kind in found.sent} >= {"all-reduce"}


def test_programs_of_few_layers_say_what_more_layers_take():
    kind = Kind("all-reduce", 2, False)
    few, more = {"flops": 10.0, kind: 4.0}, {"flops": 16.0, kind: 8.0}
    assert compiled.extrapolated([few, more], 4) == more
    assert compiled.extrapolated([few, more], 10) == {"flops": 34.0, kind: 20.0}


def test_the_command_prints_both_tables_and_writes_numbers(tmp_path):
    done = programs.run(
        *("launch.plan", "--model=qwen3-8b", "--chip=h100", "--devices=8", "--attention=nsa"),
        f"--json={tmp_path}/plan.json",
    )
    assert done.returncode == 0, done.stderr
    assert "learner: one GRPO step of 1,048,576 tokens" in done.stdout
    assert "new weights from" in done.stdout
    assert "--config.model.attention=nsa" in done.stdout
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["learner"][0]["source"] == "arithmetic"
    assert 0.0 < written["learner"][0]["mfu"] <= 1.0


REFUSED = {
    ("--model=gpt",): "--model=gpt must be one of ",
    ("--model=qwen3-8b", "--mesh=tensor=3"): "--mesh=tensor=3 must be a mesh of 8 devices",
    ("--model=qwen3-8b", "--mesh=rows=8"): "--mesh=rows=8 must name sizes of data, ",
    ("--model=qwen3-8b", "--tokens=1000"): "--tokens=1000 must be a multiple of",
    ("--model=qwen3-8b", "--attention=nsaa"): "--attention = 'nsaa': expected one of 'dense', ",
    ("--model=qwen3-8b", "--attention=('nsa',) * 5"): "* 5 must be a name, or a tuple",
    (
        "--model=qwen3-8b",
        "--documents=9",
    ): "--documents=9 of --document_tokens=1024 are 9216 tokens",
    ("--model=qwen3-8b", "--documents=2", "--compile=1"): "are counted by arithmetic alone",
    ("--model=qwen3-8b", "--prompts=8192"): "--prompts=8192 are tokens of a row: --context=8192, ",
    ("--model=qwen3-8b", "--prompts=9", "--offload=activations"): "goes with none of --documents, ",
}


@pytest.mark.long
def test_what_cannot_be_planned_is_named():
    for line, words in REFUSED.items():
        done = programs.run("launch.plan", *line)
        assert done.returncode == 2 and words in done.stderr, done
