"""Every config is complete, documented and read in full."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from attention.cache.paged import page_size
from attention.methods.api import METHODS
from configs import long_context, quickstart
from experiments.recall.study import RecallExperiment
from launch.realtime import RealtimeConfig
from models.families import PRESETS
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.metrics.values import read_metrics
from rl_code.recording.process_training import ProcessModelConfig
from rl_code.recording.reward_models import RewardModelConfig
from rl_code.run.config import RunConfig
from rl_code.train import train
from sweeps import runs as sweep_runs
from tests.models.small import narrow_preset

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*.py") if "def get_config" in path.read_text()
)
LABELS = ("Command:", "Hardware:", "Run time:", "Expected metric:")

# What a config fills, where that is not a run's.
KINDS = {
    "realtime.py": RealtimeConfig,
    "realtime_agent.py": RealtimeConfig,
    "realtime_documents.py": RealtimeConfig,
    "realtime_jumps.py": RealtimeConfig,
    "seldom.py": RealtimeConfig,
    "rehearsal.py": RealtimeConfig,
    "recall.py": RecallExperiment,
    "process_model.py": ProcessModelConfig,
    "reward_model.py": RewardModelConfig,
}

# Methods of which a whole run of another test consists, or a part of the layers of each.
ELSEWHERE = ("dense", "window")
# The others, with blocks of one size, since layers of one model choose blocks of one size.
IN_LAYERS = {
    "nsa": dict(name="nsa", block=64),
    "moba": dict(name="moba", block=64),
    "gated_documents": dict(name="gated_documents"),
}
# What --config.model.attention may be: each method, and different ones for different layers.
ATTENTION = (*IN_LAYERS, *ELSEWHERE, ("window", "dense"), ("window", dict(name="nsa", block=32)))

every_config = pytest.mark.parametrize(
    "path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT))
)


def load(path: Path, argument: str = "") -> ml_collections.ConfigDict:
    return runpy.run_path(str(path))["get_config"](*filter(None, [argument]))


def sections(cls: Any) -> Iterator[type]:
    """A config's dataclass and every dataclass inside it, in tuples and unions too."""
    if dataclasses.is_dataclass(cls):
        yield cls
    for hint in (
        *typing.get_args(cls),
        *(typing.get_type_hints(cls).values() if dataclasses.is_dataclass(cls) else ()),
    ):
        yield from sections(hint)


def attributes_read(tree: ast.AST) -> set[str]:
    """Names x of every ``something.x`` or ``something["x"]`` read, except where a dataclass checks
    its own fields.
    """
    checks = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
        for inner in ast.walk(node)
    }
    loads = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load)]
    attributes = {
        node.attr for node in loads if isinstance(node, ast.Attribute) and id(node) not in checks
    }
    return attributes | {
        ast.unparse(node.slice).strip("'") for node in loads if isinstance(node, ast.Subscript)
    }


def unread(cls: type, read: set[str]) -> list[str]:
    """The keys of a config that no code reads."""
    return sorted(
        f"{section.__name__}.{field.name}"
        for section in sections(cls)
        for field in dataclasses.fields(section)
        if field.name not in read
    )


@every_config
@pytest.mark.parametrize("argument", ["", "smoke"])
def test_a_config_fills_its_dataclass_exactly(path, argument):
    config = load(path, argument)
    made = read_config.build(KINDS.get(path.name, RunConfig), config)
    if isinstance(made, RunConfig):
        assert made.train.without_effect() == ()
    with pytest.raises((AttributeError, KeyError)):
        config.lock()
        config.no_such_key = 1


def with_attention(config: ml_collections.ConfigDict, attention: Any) -> RunConfig:
    """A config as --config.model.attention changes it."""
    completed = read_config.complete(RunConfig, config)
    with completed.model.ignore_type():
        completed.model.attention = attention
    return read_config.build(RunConfig, completed)


@every_config
@pytest.mark.parametrize("argument", ["smoke", pytest.param("", marks=pytest.mark.long)])
def test_a_config_takes_every_method_of_attention(path, argument):
    if path.name in KINDS:
        pytest.skip("it names methods itself")
    given = load(path, argument)
    plain = with_attention(given, "dense")
    shape = plain.model.shape()
    for attention in ATTENTION:
        if shape is not None and isinstance(attention, tuple):
            # as many layers as repeat evenly
            attention = ("window",) * (shape.num_layers % len(attention)) + attention
        config = with_attention(given, attention)
        methods = config.model.methods()
        engines = [config.rollout.engine, *(s.engine for s in config.suites if s.engine)]
        for engine in engines:
            assert page_size(methods, engine.page) == engine.page
            assert engine.view_block % engine.page == 0
        # trees of prompt and trajectories fit the rows; 0 stays 0 where nothing is aligned
        chooses = any(method.block_size() for method in methods)
        assert (config.train.pack.runs >= 2) == chooses
        if not chooses:
            assert config.rollout.engine == plain.rollout.engine
            assert config.train.pack == plain.train.pack


def test_attention_that_no_run_can_have_is_one_line():
    given = quickstart.get_config("smoke")
    for attention, message in {
        "nssa": "config.model.attention = 'nssa'.* Did you mean 'nsa'",
        ("nsa", "moba"): "config.model.attention: layers choose blocks of 64 and 512 tokens; give",
        ("nsa", "dense", "dense"): "num_layers=4 must be a multiple of the 3 layers of attention",
        "squid": "squid is dense attention over documents.* add the section documents.*it is 'gated_documents'",
        (): "num_layers=4 must be a multiple of the 0 layers of attention",
    }.items():
        with pytest.raises(ConfigError, match=message) as raised:
            with_attention(given, attention)
        assert "\n" not in str(raised.value)


@pytest.mark.long
def test_the_quickstart_takes_a_step_with_methods_of_every_kind(tmp_path, monkeypatch):
    """One layer of each."""
    indexer = dict(name="dsa", picks=100, index_heads=2, index_size=16, index_loss=0.1)
    layers = (IN_LAYERS["nsa"], "sinks", "mla", indexer)
    # A method that keeps a state goes with less: tests/rl_code/run/test_states_config.py. MoBA and
    # gated_documents are in the test below.
    others = {*ELSEWHERE, "moba", "gated_documents", "squid", "gated_delta"}
    assert {*METHODS} - others == {"nsa", "sinks", "mla", "dsa"}
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_layers=len(layers), num_kv_heads=1))
    given = quickstart.get_config("smoke")
    given.mesh.data = 1
    given.sft = None  # a warm start has its own program
    given.rollout.engine.slots = 4  # as many as there are episodes
    # a method that chooses blocks is slow to decode as tests compile it
    given.limits.update(turns=2, turn_tokens=24)
    given.train.update(steps=1, tasks_per_step=2, group_size=2, micro_batches=2)
    given.train.pack.drop_uninformative = False
    given.train.loss.entropy_coef = 0.01  # a gradient even where all rewards are equal
    given.suites = ()
    train(with_attention(given, layers), tmp_path)
    (row,) = read_metrics(tmp_path)
    assert row["train/finite"] == 1.0 and row["train/grad_norm"] > 0
    assert row["indexer/loss"] > 0
    # the sampler, which decodes from pages, computes what the trainer does from rows
    assert row["policy/mismatch_max"] < 1e-3


@pytest.mark.long
def test_the_long_context_agent_takes_a_step(tmp_path):
    """Other methods with documents are in ``test_run_with_documents``."""
    given = long_context.get_config("smoke")
    given.model.attention = (long_context.LOCAL, "gated_documents", long_context.METHODS["moba"])
    given.documents = long_context.DOCUMENTS
    given.sft.update(steps=1)
    given.train.update(steps=1)
    given.train.loss.entropy_coef = 0.01  # a gradient even where all rewards are equal
    given.suites = ()
    train(read_config.build(RunConfig, given), tmp_path)
    (row,) = read_metrics(tmp_path)
    assert row["train/finite"] == 1.0 and row["train/grad_norm"] > 0
    assert row["policy/mismatch_max"] < 1e-3
    assert row["engine/documents"] > 0
    assert row["engine/prefilled_tokens"] > 0 and row["pack/tokens"] > 0


@every_config
def test_a_config_is_documented_and_short(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.splitlines()[0]) > 10, "the first line says what it reproduces"
    assert [label for label in LABELS if label not in docstring] == []
    assert str(path.relative_to(ROOT)) in docstring or "launch/quickstart.sh" in docstring
    assert len(text.splitlines()) < 150


@every_config
def test_an_unknown_argument_is_refused(path):
    with pytest.raises(ValueError, match="nonsense"):
        load(path, "nonsense")


@every_config
@pytest.mark.parametrize("argument", [(), pytest.param(("smoke",), marks=pytest.mark.long)])
def test_every_override_of_a_sweep_can_be_given_to_a_run_of_the_config(path, argument, monkeypatch):
    module = runpy.run_path(str(path))
    if "get_sweep" not in module:
        pytest.skip("no sweep")
    config = module["get_config"](*argument)
    runs = sweep_runs.plan(config, module["get_sweep"](*argument), Path())
    assert runs
    # the text of a flag's default, which --help shows, takes half of the time
    monkeypatch.setattr(ml_collections.ConfigDict, "__str__", object.__repr__)
    seen = set()
    for run in runs:
        overrides = {(key, repr(value)) for key, value in run.overrides.items()}
        if overrides <= seen:
            continue
        seen |= overrides
        # as the command line of the run reads it
        given, line = flags.FlagValues(), ["train", *run.flags()]
        whole = read_config.complete(RunConfig, config)
        config_flags.DEFINE_config_dict("config", whole, flag_values=given, sys_argv=line)
        given(line)
        made = read_config.build(RunConfig, given.config)
        assert read_config.diff(made, run.config) == []
        assert made.train.without_effect() == ()


def test_every_key_is_read():
    kinds = (RunConfig, *KINDS.values())
    wanted = {
        field.name for kind in kinds for cls in sections(kind) for field in dataclasses.fields(cls)
    }
    read = set()
    folders = "rl_code people models attention cluster planner sweeps launch experiments"
    for folder in folders.split():
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            # parsed only where the name of a key stands that no file before has read
            if not (wanted - read).isdisjoint(re.findall(r"\w+", text)):
                read |= attributes_read(ast.parse(text))
    assert [unread(kind, read) for kind in kinds] == [[]] * len(kinds)


def test_a_key_that_nothing_reads_is_found():
    @dataclasses.dataclass(frozen=True)
    class Section:
        used: int
        unused: int

        def __post_init__(self):
            assert self.unused > 0

    source = inspect.cleandoc("""
        class Section:
            def __post_init__(self):
                assert self.unused > 0
        def f(config):
            config.unused_too = 1
            return config.used
    """)
    assert unread(Section, attributes_read(ast.parse(source))) == ["Section.unused"]
