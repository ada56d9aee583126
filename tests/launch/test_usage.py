"""What the command line says of itself."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import __main__ as launch_main
from launch import usage
from rl_code.config import read_config
from rl_code.run import derive
from rl_code.run.config import RunConfig
from tests import programs

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_is_listed_with_one_sentence():
    listed = dict(launch_main.commands())
    names = {command.rpartition(" ")[2] for command in listed}
    for path in (ROOT / "launch").glob("*.py"):
        runs = "if __name__" in path.read_text() and path.name != "__main__.py"
        assert (f"launch.{path.stem}" in names) == runs, path
    assert {"experiments.recall", "launch/quickstart.sh", "launch/test.sh"} <= names
    assert all(len(words) > 20 and words.endswith(".") for words in listed.values())


def test_commands_in_help_keep_their_lines():
    """In a text of Python a backslash at the end of a line takes the break away, unless doubled."""
    for path in [*ROOT.glob("launch/*.py"), *ROOT.glob("experiments/*/__main__.py")]:
        words = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        joined = [line for line in words.splitlines() if re.search(r"\S {4,}--", line)]
        assert joined == [], path


@pytest.fixture(scope="module")
def helped() -> str:
    """What launch.train --help prints, without its line breaks."""
    done = programs.run("launch.train", "--help")
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "words",
    ["--config", "--workdir", "--role", "--compilation_cache", "train.steps", "suites[0].count"],
)
def test_help_names_the_flags_and_the_keys(helped, words):
    assert words in helped


def test_help_has_a_row_for_every_key_that_a_config_may_set():
    keys = {key.name: key for key in usage.keys(RunConfig)}
    assert keys["train.steps"].value == "must be set"
    assert keys["checkpoint.keep"].value == "2" and keys["checkpoint.keep"].words
    assert keys["train.optimizer.total_steps"].value == "from train.steps x train.epochs"
    assert keys["sft"].value == "None" and "sft.steps" in keys
    # what follows from another key is none
    assert "train.loss.temperature" not in keys and "train.pack.max_staleness" not in keys


def test_every_value_that_is_derived_says_from_what():
    keys = {key.name.replace("[0]", "") for key in usage.keys(RunConfig)}
    assert sorted(derive.WHY.keys() - keys) == []


def test_a_number_is_described_in_words():
    assert read_config.describe(int | None) == "int or None"


HELPS = """
import contextlib, importlib, io, json, os, runpy, sys
shown, modules = map(json.loads, sys.argv[1:])
# as while Python looks for the module of -m
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "experiments.tab", "--help"]
import experiments
from launch import unloaded
def real():
    return [x for x in unloaded.LIBRARIES if getattr(sys.modules.get(x), "__file__", None)]
texts = {}
for name in shown:
    read, write = os.pipe()
    if os.fork() == 0:  # flags are defined once in a process
        sys.argv = [name, "--help"]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        with os.fdopen(write, "w") as pipe:
            json.dump([out.getvalue(), real()], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        texts[name] = json.load(pipe)
    os.wait()
loaded = {}
for name in modules:
    importlib.import_module(name)
    if found := real():
        loaded[name] = found
        break
print(json.dumps([texts, loaded]))
"""


@pytest.mark.long
def test_no_help_loads_a_library_that_takes_seconds(helped):
    shown = ["launch.train", "launch.serve", "launch.plan", "experiments.thumbs"]
    commands = [line.removeprefix("python -m ") for line, _ in launch_main.commands()]
    modules = [
        f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name
        for name in commands
        if "/" not in name
    ]
    arguments = [json.dumps(shown), json.dumps(modules)]
    done = subprocess.run(
        [sys.executable, "-c", HELPS, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    texts, loaded = json.loads(done.stdout)
    assert loaded == {} and len(modules) > 40
    assert all(real == [] and "flag" in text for text, real in texts.values())
    # and says what it says with them
    assert " ".join(texts["launch.train"][0].split()) == helped


def test_commands_that_read_no_config_of_a_run_load_no_jax():
    """Sections of a run's config stand beside the code that uses them, so reading one loads jax."""
    studies = [f"experiments.{name}.__main__" for name in ("ab", "cheater", "tab", "simulators")]
    names = ("export_sessions", "forget", "get_mbpp", "layers", "lsp", "make_suite", "make_tasks")
    modules = ", ".join([*(f"launch.{name}" for name in names), *studies])
    program = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
