"""A wrong command line ends in one paragraph that names what is wrong, never in a traceback."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags
from ml_collections import config_flags

from configs import quickstart
from launch import command, flags, train
from rl_code.config import read_config
from rl_code.run.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
import ml_collections
def get_config(arg=""):
    if arg not in ("", "smoke"):
        raise ValueError(f"{arg!r} is neither empty nor smoke")
    return ml_collections.ConfigDict({"steps": 1 if arg else 3, "loss": {"low": 0.2, "levels": (1, 2), "kl": None}})
"""

# One process imports; each case runs in a fork of it.
SCRIPT = """
import json, os, sys
from launch import flags
from rl_code.checkpoint.checkpoint import CheckpointError
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import Stopped

def main(config, workdir):
    if config.steps == 100:
        raise ConfigError("config.steps = 100: expected less")
    if config.steps == 101:
        raise CheckpointError("no checkpoint can be read")
    if config.steps == 102:
        raise ValueError("a bug")
    if config.steps == 104:
        raise Stopped("stopped after step 3 of 9")
    if config.steps == 105:
        raise KeyboardInterrupt
    if config.steps == 103:
        raise OSError(28, "the disk is full", "metrics.jsonl")
    if config.steps == 106:
        raise PermissionError(13, "may not", "w/metrics.jsonl")
    print(json.dumps([config.to_dict(), workdir]))

for number, case in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        output = os.open(f"{number}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv = ["train", *case]
        try:
            flags.run(main)
        except SystemExit as error:
            print("EXIT", error.code, flush=True)
        except BaseException as error:
            print("RAISED", type(error).__name__, flush=True)
        os._exit(0)
    os.wait()
"""

# Config files with a mistake.
WRONG = {
    "brackets.py": "def get_config(\n",
    "imports.py": "import json\nimport no_such_module\n",
    "divides.py": "def get_config():\n    return 1 / 0\n",
    "misspells.py": "def get_config():\n    return int.no_such_name\n",
}
COMPLAINTS = {
    "--config=c.py --workdir=gs://bucket/run": "gs://bucket/run is an object store",
    "--config=c.py --workdir=w --config.stps=3": 'Did you mean "steps"',
    "--config=c.py --workdir=w --config.loss.lw=3": 'Did you mean "low"',
    "--config=c.py --workdir=w --config.episode_s=3": "episode_s. It is called 'tools_s' now",
    "--config=c.py --workdir=w --config.steps=many": "--config.steps=many",
    "--config=c.py --workdir=w --config.steps=1.5": "--config.steps=1.5",
    "--config=c.py --workdir=w --config.loss=3": "--config.loss=3",
    "--config=c.py --workdir=w --config.loss.kl=3": "config.loss.kl is not supported for overriding",
    "--config=c.py:smke --workdir=w": "'smke' is neither empty nor smoke",
    "--config=nothing.py --workdir=w": "nothing.py",
    "--config=c.py": "--workdir=<folder> is missing",
    "--workdir=w": "--config=<file> is missing",
    "--config=c.py --workdri=w": "workdri",
    "--config=c.py --workdir=w steps=3": "'steps=3' is not a flag",
    "--config=c.py --workdir=c.py": "--workdir=c.py: {folder}/c.py is a file; name a folder",
    "--config=c.py --workdir=c.py/a/b": "{folder}/c.py is a file; name a folder",
    "--config=brackets.py --workdir=w": "brackets.py, line 1: SyntaxError: '(' was never closed",
    "--config=imports.py --workdir=w": "imports.py, line 2: ModuleNotFoundError: No module named",
    "--config=divides.py --workdir=w": "divides.py, line 2: ZeroDivisionError: division by zero",
    "--config=misspells.py --workdir=w": "misspells.py, line 2: AttributeError: type object 'int'",
}
ENDINGS = {
    "--config=c.py --workdir=w --config.steps=100": "config.steps = 100: expected less\nEXIT 2",
    "--config=c.py --workdir=w --config.steps=101": "no checkpoint can be read\nEXIT 1",
    "--config=c.py --workdir=w --config.steps=102": "RAISED ValueError",
    "--config=c.py --workdir=w --config.steps=104": (
        "stopped after step 3 of 9; the same command continues from the last checkpoint\nEXIT 130"
    ),
    "--config=c.py --workdir=w --config.steps=105": (
        "stopped; the same command goes on from what is on the disk\nEXIT 130"
    ),
    "--config=c.py --workdir=w --config.steps=103": (
        "metrics.jsonl: the disk is full; make room, and give the same command again\nEXIT 1"
    ),
    "--config=c.py --workdir=w --config.steps=106": (
        "w/metrics.jsonl: may not: this user may not; name a place that they may use, or change its owner or mode\n"
        "EXIT 2"
    ),
}
GOOD = "--config=c.py:smoke --workdir=w --config.loss.low=1 --config.loss.levels=(3,4)"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    """What each command line prints, and how it ends."""
    folder = tmp_path_factory.mktemp("flags")
    for name, text in {"c.py": CONFIG, **WRONG}.items():
        (folder / name).write_text(text)
    cases = [*COMPLAINTS, *ENDINGS, GOOD]
    arguments = json.dumps([case.split() for case in cases])
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], cwd=folder, env=environment, check=True
    )
    texts = [(folder / f"{number}.txt").read_text() for number in range(len(cases))]
    return {
        case: text.replace(str(folder), "{folder}") for case, text in zip(cases, texts, strict=True)
    }


@pytest.mark.parametrize("line", COMPLAINTS)
def test_a_wrong_command_line_is_named_without_a_traceback(outputs, line):
    assert COMPLAINTS[line] in " ".join(outputs[line].split())
    assert "Traceback" not in outputs[line] and outputs[line].endswith("EXIT 2\n")
    assert len(outputs[line].splitlines()) <= 5


@pytest.mark.parametrize("line", ENDINGS)
def test_an_expected_error_is_told_and_a_bug_keeps_its_traceback(outputs, line):
    assert outputs[line].strip().endswith(ENDINGS[line])
    assert "Traceback" not in outputs[line]


def test_a_config_is_read_with_its_argument_and_overrides(outputs):
    config, workdir = json.loads(outputs[GOOD].splitlines()[0])
    assert (
        config == {"steps": 1, "loss": {"low": 1.0, "levels": [3, 4], "kl": None}}
        and workdir == "w"
    )


def test_a_command_that_is_shown_has_the_overrides_of_the_run_and_their_quotes(monkeypatch):
    given = [
        "train",
        "--config=configs/a b.py:smoke",
        "-config.train.steps=3",
        "--workdir=runs/x",
        "--config.model.lora={'rank': 16}",
        "--config.seed",
        "7",
        "--config.sft=None",
        "--config.tokenizer.special=a=b",
    ]
    monkeypatch.setattr(sys, "argv", given)
    config = "--config=configs/a b.py:smoke"
    rest = ["--config.model.lora={'rank': 16}", "--config.seed=7", "--config.sft=None"]
    rest += ["--config.tokenizer.special=a=b"]
    assert flags.given() == [config, "--config.train.steps=3", *rest]
    assert flags.given(but=("train.steps",)) == [config, *rest]
    line = command.shown("launch.train", *flags.given(), "--workdir=my runs/x")
    assert shlex.split(line)[3:] == [*flags.given(), "--workdir=my runs/x"]


def test_what_comes_next_names_a_suite_of_the_run_and_more_steps(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["train", "--config=configs/quickstart.py:smoke", "--config.train.steps=5"]
    )
    settings = quickstart.get_config("smoke")
    settings.train.steps = 5
    told = train.what_next(read_config.build(RunConfig, settings), "runs/a b")
    lines = [shlex.split(line) for line in told.splitlines() if not line.startswith(("#", "Next"))]
    config = ["--config=configs/quickstart.py:smoke"]
    steps = ["--config.train.steps=5"]
    run = ["--workdir=runs/a b"]
    assert [line[2:] for line in lines] == [
        ["launch.evaluate", *config, *steps, *run, "--suite=held_out"],
        ["launch.export", *run, "--out=exports/a b"],
        ["launch.train", *config, *run, "--config.train.steps=10"],
    ]
    settings.suites = ()
    assert "launch.evaluate" not in train.what_next(
        read_config.build(RunConfig, settings), "runs/a"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("protocol.name=compact", "config.protocol = 'compact' has no keys"),
        ("train.loss.policy.clip_high=1.0", "config.train.loss.policy = 'ppo' has no keys"),
        ("tasks.levels.first=1", "config.tasks.levels = (1, 2, 2) has no keys"),
        ("seed.of=1", "config.seed = 0 has no keys"),
        ("suites[9].count=8", "config.suites has 2 elements"),
    ],
)
def test_a_key_of_what_has_none_is_refused(override, words, monkeypatch):
    line = ["train", "--config=configs/quickstart.py:smoke", f"--config.{override}"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.chdir(ROOT)
    given = absl_flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=given)
    given["config"].parser = flags._Complete(given["config"].parser, RunConfig, [])
    with pytest.raises(absl_flags.IllegalFlagValueError, match=re.escape(words)):
        given(line)
