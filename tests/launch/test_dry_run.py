"""A dry run says what follows from a config and what a run would take, and touches nothing."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import rich.console

from configs import own_model, ppo, quickstart
from launch import dry_run, flags
from models.transformer import parameter_count
from rl_code.config.named import Named
from rl_code.config.read_config import build
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.tools.api import TOOLS, find_tools, offered
from rl_code.run import dry_run as dry_run_of_a_run
from rl_code.run.config import RunConfig
from rl_code.run.dry_run import Plan, Program, tool_tokens
from rl_code.types import Task, Tests


def dry(settings) -> tuple[str, Plan, RunConfig]:
    """What is printed, the plan, and the config."""
    config = build(RunConfig, settings)
    console = rich.console.Console(record=True, width=160, file=io.StringIO())
    plan = dry_run.show(console, config, set(flags.dotted(settings)))
    return console.export_text(), plan, config


def narrow(settings):
    """The config with a smaller model and without a warm start, which has a program of its own."""
    settings.model.preset = "tests.models.small:NARROW"
    settings.sft = None
    return settings


@pytest.fixture(scope="module")
def shown() -> tuple[str, Plan, RunConfig]:
    return dry(narrow(quickstart.get_config("smoke")))


def row(text: str, key: str) -> str:
    """The line of the printed tables that starts with a key."""
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(f"{key} "))


def test_what_was_derived_is_marked(shown):
    text, _, config = shown
    assert row(text, "train.optimizer.total_steps").endswith("derived: train.steps x train.epochs")
    assert row(text, "train.steps").endswith("set")
    assert row(text, "checkpoint.keep").endswith("default")
    assert row(text, "suites[0].count").endswith("set")
    pages = row(text, "rollout.engine.pages")
    assert str(config.rollout.engine.pages) in pages and "derived" in pages


@pytest.mark.parametrize("width", [80, 132])
def test_values_of_the_config_have_room_on_any_screen(width):
    settings = own_model.get_config()
    config = build(RunConfig, settings)
    console = rich.console.Console(record=True, width=width, file=io.StringIO())
    written = set(flags.dotted(settings))
    console.print(dry_run.config_table(config, written, narrow=width < dry_run.WIDE))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "'weights/Qwen2.5-Coder-0.5B-Instruct'" in text
    assert "derived: train.steps x train.epochs" in text


def test_what_tools_take_of_a_prompt_adds_up(shown):
    text, plan, config = shown
    # the compact protocol declares none
    assert set(plan.tools.values()) == {0} and set(plan.tools) > set(find_tools(config.tools))
    assert row(text, "run_tests").endswith(" 0")
    # the tools of an MCP server are those that it lists
    tools = find_tools(tuple(Named(name) for name in TOOLS if name != "mcp"))
    protocol = PROTOCOLS["hermes"]

    def letters(task) -> int:
        return len(protocol.prompt(task, offered(task, tools)))

    found = tool_tokens(letters, list(tools))
    nothing = Task(
        "", ({"role": "user", "content": "Mend it."},), {}, "", "f", Tests(), Tests(), {}
    )
    assert letters(nothing) - letters(dataclasses.replace(nothing, tools=())) == sum(found.values())
    # a declaration stands there once, as JSON on a line
    for name, tool in tools.items():
        schema = {"type": "function", "function": tool.schema}
        assert found[name] >= len(json.dumps(schema)) > 100


def test_parameters_and_memory_are_those_of_the_model(shown):
    _, plan, config = shown
    shape = config.model.shape()
    # a vocabulary that is trained on few texts comes out smaller than asked for
    sizes = [config.tokenizer.vocab_size - 64, config.tokenizer.vocab_size]
    least, most = (parameter_count(dataclasses.replace(shape, vocab_size=size)) for size in sizes)
    assert least <= plan.parameters <= most
    assert (plan.parameters - least) % ((most - least) // 64) == 0  # as many for each token
    parts = {(part.where, part.name): part.bytes for part in plan.memory}
    assert parts["learner", "weights"] == 4 * plan.parameters
    # two moments for each parameter, and counters
    assert 8 * plan.parameters <= parts["learner", "optimizer"] < 8 * plan.parameters + 4096
    assert parts["sampler", "weights"] == 0 and parts["sampler", "pages"] > 0
    working = [part.bytes for part in plan.memory if part.name.startswith("working")]
    kept = sum(part.bytes for part in plan.memory) - sum(working)
    assert plan.device_bytes("learner") == kept + max(working) and min(working) > 0
    assert plan.sampled_tokens == 16 * 288 and plan.trajectories == 16


def test_each_attention_call_says_what_it_runs(shown):
    text, plan, _ = shown
    assert {call.phase for call in plan.attention} == {"train", "prefill", "decode"}
    assert "no kernel for cpu" in text


def dry_with_values(backbone: str, **rollout) -> Plan:
    """The plan of a run with a value function, whose parts are checked."""
    settings = narrow(ppo.get_config("smoke"))
    settings.train.value.backbone = backbone
    settings.rollout.update(rollout)
    text, plan, config = dry(settings)
    parts = {(part.where, part.name): part.bytes for part in plan.memory}
    head = config.model.shape().embed_dim + 1
    # the tiny model has no matrix of logits of its own
    trained = head + (plan.parameters if backbone == "separate" else 0)
    assert parts["learner", "value weights"] == 4 * trained
    assert 8 * trained <= parts["learner", "value optimizer"] < 8 * trained + 4096
    assert "value optimizer" in text and "value weights" in text
    programs = [program.name for program in plan.programs]
    assert {"values", "update, values", "update"} <= set(programs)
    return plan


@pytest.mark.long
def test_values_on_the_policys_backbone_have_weights_and_moments(monkeypatch):
    """What compiling adds is the same for any program."""

    def traced(name, trace):
        trace()
        return Program(name, 0.0, 1)

    monkeypatch.setattr(dry_run_of_a_run, "_program", traced)
    dry_with_values("shared")


@pytest.mark.long
def test_values_have_weights_and_moments_and_devices_apart_are_added_up_apart():
    plan = dry_with_values("separate", apart=True)
    assert (plan.learners, plan.samplers, plan.shared) == (2, 1, False)
    assert plan.device_bytes("learner") + plan.device_bytes("sampler") == sum(
        part.bytes for part in plan.memory
    )
    parts = {(part.where, part.name): part.bytes for part in plan.memory}
    assert parts["sampler", "weights"] == parts["learner", "weights"]
