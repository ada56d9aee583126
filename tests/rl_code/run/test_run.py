"""What a run refuses, and which tasks its suites hold."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import types
from pathlib import Path
from typing import ClassVar

import jax
import pytest
from flax import nnx

from attention.methods.api import METHODS
from configs import own_model, quickstart, smollm2_mbpp
from models.families import PRESETS
from models.sharding import MeshConfig, make_mesh
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.checkpoint import arrays
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.run import origin
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.task_sets import TaskSets
from rl_code.schedule import make_schedule
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import SourceOfWorlds
from rl_code.types import Task
from tests import draws
from tests.models.small import narrow_preset


def config(**suite):
    """The quickstart's smoke config with one suite of HumanEval."""
    settings = quickstart.get_config("smoke")
    first = dict(settings.suites[0])
    tasks = dict(name="humaneval", form="raw")
    settings.suites = (first | dict(tasks=tasks, protocol="raw_completion", samples=1) | suite,)
    return build(RunConfig, settings)


@pytest.mark.long
def test_a_suite_may_hold_the_tasks_with_the_shortest_prompts(tmp_path):
    with Run(config(count=5, shortest=True), tmp_path) as run:
        (suite,) = run.config.suites
        chosen = run.task_sets.of_suite(suite)
        lengths = [
            len(run.tokenizer.encode(PROTOCOLS["raw_completion"].prompt(task, {})))
            for task in chosen
        ]
        assert len(chosen) == 5 and lengths == sorted(lengths)
        assert lengths[-1] <= run.config.rollout.engine.prompt_length
    with Run(config(count=5), tmp_path) as run:
        (suite,) = run.config.suites
        first = [task.id for task in run.task_sets.of_suite(suite)]
        assert first == sorted(first, key=lambda name: int(name.rpartition("/")[2]))
        assert first != [task.id for task in chosen]


def test_a_prompt_is_encoded_once_for_all_who_ask_for_it(tmp_path, monkeypatch):
    with Run(config(), tmp_path) as run:
        task = run.task_sets.training[0]
        expected = run.wording.prompt(task)
        again = dataclasses.replace(task)  # as a source without end makes it anew
        monkeypatch.setattr("rl_code.run.wording.encode", lambda *_: pytest.fail("encoded again"))
        assert run.wording.prompt(again) == expected
        episodes = [run.episode(task, 0, index) for index in range(2)]
        started = [episode.start() for episode in episodes]
        assert started == [expected, expected] and started[0] is not started[1]
        for episode in episodes:
            episode.close()


def test_a_suite_of_more_tasks_than_fit_is_named(tmp_path):
    with Run(config(count=164), tmp_path) as run:
        with pytest.raises(
            ConfigError,
            match=r"suite held_out: count=164, but only \d+ tasks have a prompt of at most",
        ):
            run.task_sets.of_suite(run.config.suites[0])


@dataclasses.dataclass(frozen=True)
class Noted(SourceOfWorlds):
    """Tasks of HumanEval that note when they are built. Even ones have prompts that are too long."""

    built: ClassVar[list[int]] = []

    def count(self):
        return 8

    def builders(self, pool, workdir):
        tasks = find_source(Named("humaneval", {"form": "raw"}), "tasks").load(pool, workdir)
        shortest = sorted(tasks, key=lambda task: len(task.prefill))[:4]

        def build(index):
            self.built.append(index)
            task = shortest[index // 2]
            long = {} if index % 2 else {"prefill": task.prefill * 100}
            return dataclasses.replace(task, id=str(index), **long)

        for index in range(8):
            yield str(index), functools.partial(build, index)


def of_rows(split: str, most: int = 100) -> RunConfig:
    """A config of rows of the split "train", and with a suite of this one.

    most: tokens that a prompt may have.
    """
    tasks = dict(name="records", path=own_model.TASKS, columns=own_model.COLUMNS)
    settings = own_model.get_config("smoke")
    settings.tasks = tasks | dict(split="train")
    settings.suites = (dict(name="mine", tasks=tasks | dict(split=split)),)
    settings.rollout = dict(engine=dict(prompt_length=most))
    return build(RunConfig, settings)


def held_out(split: str, most: int = 100) -> TaskSets:
    """The tasks of ``of_rows``, whose prompts have 50 tokens."""
    return TaskSets(of_rows(split, most), None, None, lambda task, protocol: 50)


@pytest.mark.parametrize(("split", "shared"), [("train", "16 of its 16"), ("", "16 of its 24")])
def test_a_suite_of_training_tasks_is_refused(split, shared):
    with pytest.raises(ConfigError, match=f"suite 'mine': {shared} tasks are training tasks"):
        held_out(split).check_held_out()
    held_out("test").check_held_out()


def test_tasks_whose_prompts_are_all_too_long_are_named_with_what_to_raise():
    sets = held_out("test", most=49)
    suite = of_rows("test").suites[0]
    advice = "no task has a prompt of at most 49 tokens, the shortest has 50; raise limits.tokens"
    with pytest.raises(ConfigError, match=f"config.tasks: {advice}"):
        _ = sets.training
    with pytest.raises(ConfigError, match=f"suite 'mine': {advice}"):
        sets.of_suite(suite)
    with pytest.raises(ConfigError, match="suite 'mine': no task; look at the file, the split"):
        held_out("validation").check_held_out()


def test_prompts_of_endless_sources_are_checked_in_suites_and_plans():
    """One that does not fit would end the run when its turn comes, and again after a restart."""

    def number(task: Task) -> int:
        return int(task.id.split("/")[3])

    def length(task: Task, protocol: Named) -> int:
        return 50 if number(task) % 3 == 0 else 101

    config = of_rows("test")
    endless = Named("generated", dict(split="train", levels=(1,), seed=0))
    suite = dataclasses.replace(config.suites[0], tasks=endless, count=4)
    config = dataclasses.replace(config, tasks=endless, suites=(suite,))
    sets = TaskSets(config, None, None, length)
    assert [number(task) for task in sets.of_suite(config.suites[0])] == [0, 3, 6, 9]
    run = types.SimpleNamespace(config=config, task_sets=sets, workdir=None)
    schedule = make_schedule(run, None, sets.pool(None), 0)
    drawn = [number(sets.training[index]) for index in schedule._draw()]
    assert len(drawn) == config.train.tasks_per_step
    assert all(found % 3 == 0 for found in drawn)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "chosen", "built"),
    [
        (dict(count=3), [1, 3, 5], 6),
        (dict(count=3, shortest=True), [1, 5, 3], 8),  # by tokens
        (dict(count=0), [1, 3, 5, 7], 8),
    ],
)
def test_a_suite_builds_no_more_worlds_than_it_needs(tmp_path, changes, chosen, built):
    Noted.built.clear()
    tasks = dict(name=f"{__name__}:Noted")
    with Run(config(tasks=tasks, **changes), tmp_path) as run:
        assert Noted.built == []
        found = run.task_sets.of_suite(run.config.suites[0])
        assert [int(task.id) for task in found] == chosen
        assert Noted.built == [*range(built)]
    with Run(config(tasks=tasks, count=5), tmp_path) as run:
        with pytest.raises(ConfigError, match="count=5, but only 4 tasks have a prompt"):
            run.task_sets.of_suite(run.config.suites[0])


def test_a_suite_does_not_need_the_training_tasks(tmp_path):
    settings = smollm2_mbpp.get_config("smoke")
    settings.suites = (dict(smollm2_mbpp.suites()[-1], count=2),)
    settings.tasks.path = str(tmp_path / "none.jsonl")
    special = ["<|pad|>", "<|eot|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer = Tokenizer.train([inspect.getsource(textwrap)], 512, special)
    tokenizer.save(tmp_path / "tokenizer.json")
    settings.model.update(weights="")
    settings.tokenizer = dict(path=str(tmp_path / "tokenizer.json"))
    with Run(build(RunConfig, settings), tmp_path) as run:
        assert len(run.task_sets.of_suite(run.config.suites[-1])) == 2
        with pytest.raises(TaskFileError, match=r"none\.jsonl: no such file of tasks"):
            len(run.task_sets.training)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train.loss.kl_coef": 0.1}, "drop_uninformative=True drops groups that kl_coef=0.1"),
        (
            {"train.loss.temperature": 0.5},
            "train.loss.temperature: no such key; its value is that of "
            "config.rollout.sampling.temperature",
        ),
        (
            {"rollout.engine.length": 100},
            "limits.tokens=288 must not exceed rollout.engine.length=100",
        ),
        ({"model.preset": "huge"}, "config.model.preset = 'huge': expected one of .*'tiny'"),
        (
            {"tasks": {"name": "humaneval"}},
            "tokenizer.source='train' trains on demonstrations",
        ),
        ({"protocol": "hermes"}, "written in the protocol 'compact'"),
        ({"protocol": "morse"}, "config.protocol = 'morse': expected one of"),
        ({"train.advantage": "luck"}, "config.train.advantage = 'luck': expected one of"),
        ({"train.advantage": "milestones"}, "'milestones': none are measured; set config.milest"),
        ({"train.group_size": 0}, "config.train: group_size=0 must be at least 1"),
        ({"train.steps": -1}, "config.train: steps=-1 must be at least 0"),
        ({"sft.steps": 0}, "config.sft: steps=0 must be at least 1"),
        (
            {"train.optimizer.learning_rate": -1e-3},
            "config.train.optimizer: learning_rate=-0.001 must be positive",
        ),
        (
            {"rollout.mesh": {"fsdp": 2}},
            r"config.rollout: mesh.fsdp=2 must be 1: .*; set mesh.data=2 for as many rows",
        ),
        ({"train.micro_batches": 3}, "train.pack.rows=16 must divide into train.micro_batches=3"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    settings = quickstart.get_config("smoke")
    settings.update_from_flattened_dict(changes)
    with pytest.raises((ConfigError, ValueError), match=message):
        build(RunConfig, settings)


def test_endless_tasks_cannot_be_sorted():
    settings = quickstart.get_config("smoke")
    settings.suites = (dict(settings.suites[0]) | dict(shortest=True),)
    with pytest.raises(
        (ConfigError, ValueError), match="suite held_out: shortest=True sorts all tasks"
    ):
        build(RunConfig, settings)


def test_a_method_with_parameters_needs_weights_that_have_them():
    weights = Path(__file__).parents[2] / "models" / "golden" / "llama_tied"
    found = origin.find(str(weights))
    shape = found.shape(None, None)
    for name in ("dense", "window", "moba"):
        found.check_methods((METHODS[name](),), shape)
    for name, parameter in {"nsa": "compressed_k", "gated_documents": "gates"}.items():
        with pytest.raises(ConfigError, match=parameter) as raised:
            found.check_methods((METHODS[name](),), shape)
        assert "use dense, window, moba, which have none" in str(raised.value)


def saved(workdir: Path, attention=None) -> tuple[RunConfig, dict]:
    """The config of a run of a small model, and the parameters in the checkpoint of its workdir."""
    settings = quickstart.get_config("smoke")
    if attention is not None:
        settings.model.attention = attention
    config = build(RunConfig, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", narrow_preset(num_layers=4))
        with Run(config, workdir) as run, jax.set_mesh(run.mesh):
            model = run.init_model()
    with Checkpoints(workdir, {}, keep=1) as checkpoints:
        checkpoints.save(1, {"model": model}, {})
    return config, arrays.flatten(model)


@pytest.fixture(scope="module")
def with_nsa(tmp_path_factory) -> tuple[Path, RunConfig, dict]:
    """The workdir of a run with NSA, and what ``saved`` returns."""
    workdir = tmp_path_factory.mktemp("with_nsa")
    return workdir, *saved(workdir, dict(name="nsa", length=8, stride=4, block=8))


@pytest.mark.long
def test_a_method_with_parameters_starts_from_a_run_that_has_them(with_nsa):
    workdir, config, trained = with_nsa
    found = origin.find(str(workdir))
    shape = found.shape(None, None)
    methods = config.model.methods()
    found.check_methods(methods, shape)
    loaded = found.load(dataclasses.replace(shape, attention=methods), make_mesh(config.mesh))
    loaded = arrays.flatten(loaded)
    for name, x in trained.items():
        assert (x == loaded[name]).all()


@pytest.mark.parametrize("kind", ["files", "run"])
@pytest.mark.quick(first=1)
def test_a_method_with_parameters_takes_over_a_model_without_them(kind, tmp_path):
    if kind == "files":
        found = origin.find(str(Path(__file__).parents[2] / "models" / "golden" / "llama_tied"))
    else:
        saved(tmp_path)
        found = origin.find(str(tmp_path))
    shape = found.shape(None, None)
    mesh = make_mesh(MeshConfig())
    before = arrays.flatten(found.load(shape, mesh))
    methods = (METHODS["dense"](), METHODS["nsa"]())
    found.check_methods(methods, shape, change=True)
    config = dataclasses.replace(shape, attention=methods)
    model = found.load(config, mesh, change=True, seed=3)
    taken = arrays.flatten(model)
    assert all((taken[name] == x).all() for name, x in before.items())
    # the second of every two layers has the method
    for name in ("compressed_k", "compressed_v", "window_k", "window_v"):
        own = before[f"layers.{name[-1]}.value"]
        assert (taken[f"attention_1.{name}.value"] == own[1::2]).all()
    with draws.fewer_programs():
        drawn = jax.device_put(Transformer(config, nnx.Rngs(3)), jax.devices()[0])
    drawn = arrays.flatten(drawn)
    new = [
        name for name in taken.keys() - before.keys() if not name.endswith(("_k.value", "_v.value"))
    ]
    assert "attention_1.gates.value" in new and "attention_1.k_first.value" in new
    assert all((taken[name] == drawn[name]).all() for name in new)


@pytest.mark.long
def test_a_method_without_parameters_takes_over_a_model_that_has_some(with_nsa):
    workdir, config, trained = with_nsa
    found = origin.find(str(workdir))
    dense = dataclasses.replace(found.shape(None, None), attention=(METHODS["dense"](),))
    mesh = make_mesh(config.mesh)
    with pytest.raises(ConfigError, match=r"attention_0\.gates\.value: expected nothing"):
        found.load(dense, mesh)
    taken = arrays.flatten(found.load(dense, mesh, change=True))
    assert all((trained[name] == x).all() for name, x in taken.items())
