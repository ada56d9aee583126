"""Reading the workdir of a run does not run what its config names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import SecurityError

from configs import quickstart
from rl_code.config import named, read_config
from rl_code.config.read_config import ConfigError
from rl_code.environment.search.chunks import package_folder
from rl_code.harness import mini_swe_agent_driver
from rl_code.harness.command_chat import CommandChat
from rl_code.recording import kept_config
from rl_code.run import lineage, trust
from rl_code.run.config import RunConfig
from rl_code.run.workdir import CONFIG_FILE

EVIL = (
    "from pathlib import Path\nPath({mark!r}).touch()\n\n\ndef signal(episode):\n    return 0.0\n"
)


@pytest.fixture
def mark(tmp_path, monkeypatch) -> Path:
    """A file that is there once a module beside the workdir was imported."""
    found = tmp_path / "mark"
    (tmp_path / "evil_of_a_run.py").write_text(EVIL.format(mark=str(found)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil_of_a_run", raising=False)
    monkeypatch.setattr(trust, "_everything", False)
    return found


def kept(folder: Path, **changes) -> Path:
    """The workdir of a run with changes in its config."""
    config = read_config.to_dict(read_config.build(RunConfig, quickstart.get_config()))
    for key, value in changes.items():
        *sections, name = key.split("__")
        part = config
        for section in sections:
            part = part[section]
        part[name] = value
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


EVIL_NAME = {"name": "evil_of_a_run:signal"}
FOREIGN = {
    "a signal": dict(reward={"signals": [EVIL_NAME]}),
    "a name alone": dict(reward={"signals": ["tests", "evil_of_a_run:signal"]}),
    "tasks": dict(tasks={"name": "evil_of_a_run:signal", "settings": {}}),
    "tasks of tasks": dict(tasks={"name": "contradictory", "settings": {"of": EVIL_NAME}}),
    "a tool": dict(tools=[EVIL_NAME]),
    "a loss": dict(train__loss__policy=EVIL_NAME),
    "a section as a text": dict(train__loss__policy=str(EVIL_NAME)),
    "a program as a text": dict(harness=str({"name": "program", "command": ["sh"]})),
    "the standard library": dict(metrics={"extra": ["os:system"]}),
    "a folder of the tree that is no part of it": dict(metrics={"extra": ["runs.first.x:y"]}),
    "a program": dict(harness={"name": "program", "settings": {"command": ["sh"]}}),
    "a program inside": dict(harness={"name": "command_line", "settings": {"command": ["sh"]}}),
    "a known agent": dict(harness={"name": "codex", "settings": {"folder": "/tmp/agents"}}),
    "a Python": dict(harness={"name": "mini_swe_agent", "settings": {"python": "/tmp/python"}}),
    "a program by its object": dict(
        harness={"name": "rl_code.harness.program:Program", "settings": {"command": ["sh"]}}
    ),
    "an environment by its object": dict(tasks={"name": "rl_code.tasks.verifiers:Verifiers"}),
    "an environment": dict(tasks={"name": "verifiers", "settings": {"taskset": "x"}}),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_objects_outside_the_tree_are_refused_before_they_are_imported(tmp_path, mark, what):
    workdir = kept(tmp_path / "run", **FOREIGN[what])
    for read in (kept_config.read, lambda folder: kept_config.as_written(folder / CONFIG_FILE)):
        with pytest.raises(ConfigError, match=r"config\.json: config\.\S+ names .* add --trust"):
            read(workdir)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["evil_of_a_run:", "evil_of_a_run:1", "evil_of_a_run:a b", ":x"])
def test_a_module_is_not_imported_for_what_names_no_object(tmp_path, mark, name):
    with pytest.raises(ConfigError, match=r"expected a name, or package\.module:object"):
        kept_config.read(kept(tmp_path / "run", reward={"signals": ["tests", name]}))
    assert not mark.exists()


def test_a_fork_keeps_configs_that_are_checked_too(tmp_path, mark):
    workdir = kept(tmp_path / "run")
    own = kept_config.read(workdir)
    config = read_config.to_dict(own) | {"reward": {"signals": [EVIL_NAME]}}
    lineage.write(workdir, [lineage.Fork("x", 3, "", config, [], other_bits=False, differing=[])])
    with pytest.raises(ConfigError, match="add --trust"):
        lineage.configs(workdir, own)
    assert not mark.exists()


@pytest.mark.parametrize("depth", [600, 900, 1200, 3000, 10**6])
def test_a_config_that_is_nested_deeply_is_refused(tmp_path, depth):
    (tmp_path / CONFIG_FILE).write_text("[" * depth + "]" * depth)
    with pytest.raises(ConfigError):
        kept_config.read(tmp_path)


WRONG_FORKS = [
    {"step": "3"},
    {"step": float("nan")},
    {"step": -1},
    {"step": True},
    {"config": []},
    {"config": None},
    {"changes": {"a": 1}},
    {"changes": [["a", 1]]},
    {"differing": 3},
    {"parent": 5},
]


@pytest.mark.parametrize("change", WRONG_FORKS, ids=repr)
def test_forks_of_a_wrong_kind_are_refused_with_the_files_name(tmp_path, change):
    fork = dict(parent="x", step=3, time="", config={}, changes=[], other_bits=False, differing=[])
    (tmp_path / lineage.FILE).write_text(json.dumps([fork]))
    assert lineage.read(tmp_path)[0].facts()
    (tmp_path / lineage.FILE).write_text(json.dumps([fork | change]))
    with pytest.raises(ConfigError, match=f"{lineage.FILE} cannot be read: .*{next(iter(change))}"):
        lineage.read(tmp_path)
    (tmp_path / lineage.FILE).write_text("{}")
    with pytest.raises(ConfigError, match="no list of forks"):
        lineage.read(tmp_path)


def test_who_trusts_a_run_gets_its_objects(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(trust, "_everything", True)
    config = kept_config.read(kept(tmp_path / "run", reward={"signals": [EVIL_NAME]}))
    assert config.reward.signals[0].signal.name == "evil_of_a_run:signal" and mark.exists()


def test_objects_of_the_tree_need_no_trust(tmp_path, mark):
    extra = ["experiments.incidents.questions:Questions"]
    workdir = kept(tmp_path / "run", metrics={"extra": extra})
    assert kept_config.read(workdir).metrics.extra[0].name == extra[0]
    # a config file in Python is its reader's own
    assert named.find({}, "evil_of_a_run:signal", "config.x") and mark.exists()


def test_a_module_that_an_object_of_the_tree_imports_is_none_of_its_objects():
    with pytest.raises(ConfigError, match=r"'subprocess' is a module; name it itself"):
        named.find({}, "rl_code.environment.sandbox.kept:subprocess.run", "config.x")


def test_a_grammar_is_found_without_an_import(mark):
    with pytest.raises(ValueError, match=r"'evil_of_a_run\.x' must be the name of a package"):
        package_folder("evil_of_a_run.x")
    assert not mark.exists()


def test_templates_of_agents_are_rendered_in_a_sandbox():
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="access to attribute '__class__'"):
        CommandChat(reach, "", "").opening("task")
    with pytest.raises(ConfigError, match="'tasks' is undefined"):
        CommandChat("a", "{{ tasks }}", "").opening("task")
    assert CommandChat("a", "{{ task }}!", "").opening("b") == (("system", "a"), ("user", "b!"))


def test_the_package_of_an_agent_renders_its_templates_in_a_sandbox(monkeypatch):
    monkeypatch.setattr(jinja2, "Template", jinja2.Template)  # put back at the end
    mini_swe_agent_driver.sandbox_templates()
    made = jinja2.Template("{{ task }}{{ nobody }}", undefined=jinja2.StrictUndefined)
    with pytest.raises(jinja2.UndefinedError, match="'nobody' is undefined"):
        made.render(task="a")
    with pytest.raises(SecurityError, match="__class__"):
        jinja2.Template("{{ ''.__class__.__mro__ }}").render()
    assert jinja2.Template("{{ task }}").render(task="a") == "a"


def test_the_flag_is_taken_before_a_config_is_read(monkeypatch):
    from launch import trusted

    monkeypatch.setattr(trust, "_everything", False)
    for arguments in ([], ["--notrust"], ["--trust=false"], ["--workdir=--trust"]):
        trusted.take(["launch.replay", "runs/a", *arguments])
        assert not trust.given()
    for argument in ("--trust", "-trust", "--trust=true"):
        monkeypatch.setattr(trust, "_everything", False)
        trusted.take(["launch.replay", "runs/a", argument])
        assert trust.given() and trusted.passed_on() == ["--trust"]
