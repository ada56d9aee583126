"""Settings of Harbor's tasks, and their comparison with the package's own models."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from rl_code.environment.script_grader import NoReward, json_rewards, text_reward
from rl_code.tasks.harbor_settings import read_instruction, read_settings
from rl_code.tasks.source import NoTask
from tests.rl_code.tasks.harbor_folders import SUM, write

PYTHON = os.environ.get("HARBOR_PYTHON", "")
# 470 MB and 120 packages, so it is nothing that this project needs.
needs_package = pytest.mark.skipif(
    not PYTHON,
    reason="no Python with harbor: python -m venv hb; hb/bin/pip install harbor==0.26.0; "
    "HARBOR_PYTHON=hb/bin/python",
)

TOMLS = {
    "none": "",
    "old": 'version = "1.0"\n[verifier]\ntimeout_sec = 12\n[agent]\ntimeout_sec = 0.5\n',
    "new": 'schema_version = "1.3"\n[task]\nname = "lab/sum"\n[environment]\ncpus = 2\nmemory = "2G"\n'
    'docker_image = "lab/sum:1"\nworkdir = "/app"\nallow_internet = true\nos = "Linux"\n'
    '[environment.env]\nA = "1"\n[verifier.env]\nB = "${NOT_SET_HERE:-x y}"\n'
    '[solution.env]\nC = "${NOT_SET_HERE:-}"\n[metadata]\nx = [1]\n',
}
INSTRUCTIONS = ("Do it.\n", "<!-- CANARY a -->\n# canary b\n\n\nDo it.\n", "Do it.\n# canary\n")
TEXTS = ("1", "0.5\n", " 1e3 ", "-2", "", " ", "nan", "inf", "1,5", "true", "1 2")
JSONS = ("{}", '{"reward": 1}', '{"a": 0.5, "b": true}', '{"a": NaN}', '{"a": 1e309}', '{"a": "1"}',
         '{"a": null}', '{"a": [1]}', "[]", "1", "", "{", '{"a": -1.5}')  # fmt: skip

DRIVER = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from harbor.models.task.task import Task
from harbor.models.verifier.result import VerifierResult
from harbor.utils.env import resolve_env_vars
from harbor.verifier.verifier import Verifier

asked = json.load(sys.stdin)
tasks = []
for folder in asked["folders"]:
    task = Task(Path(folder))
    config = task.config
    tasks.append([
        config.verifier.timeout_sec, config.agent.timeout_sec, config.environment.docker_image or "",
        config.environment.workdir or "", resolve_env_vars(config.environment.env),
        resolve_env_vars(config.verifier.env), resolve_env_vars(config.solution.env),
        task.instruction.strip(),
    ])
at = Path(asked["file"])
verifier = object.__new__(Verifier)
verifier.trial_paths = SimpleNamespace(reward_text_path=at, reward_json_path=at)

def read(text, how):
    at.write_text(text)
    try:
        return VerifierResult(rewards=how()).rewards
    except Exception:
        return None

print(json.dumps({
    "tasks": tasks,
    "texts": [read(text, verifier._parse_reward_text) for text in asked["texts"]],
    "jsons": [read(text, verifier._parse_reward_json) for text in asked["jsons"]],
}))
"""


def written(tmp_path):
    """Folders of all settings, and of all instructions."""
    folders = [write(tmp_path / name, SUM, **{"task.toml": text}) for name, text in TOMLS.items()]
    for number, text in enumerate(INSTRUCTIONS):
        folders.append(write(tmp_path / str(number), SUM, **{"instruction.md": text}))
    return folders


def ours(read, text):
    try:
        return read(text)
    except NoReward:
        return None


@needs_package
@pytest.mark.long
def test_settings_and_rewards_are_read_as_the_package_reads_them(tmp_path):
    folders = written(tmp_path)
    asked = {"folders": [str(path) for path in folders], "file": str(tmp_path / "reward")}
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", DRIVER],
        input=json.dumps({**asked, "texts": TEXTS, "jsons": JSONS}),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout)
    for folder, found in zip(folders, theirs["tasks"], strict=True):
        own = read_settings(folder)
        assert found == [
            own.verifier_s,
            own.agent_s,
            own.image,
            own.workdir,
            own.environment,
            own.verifier_environment,
            own.solution_environment,
            read_instruction(folder),
        ]
    for text, found in zip(TEXTS, theirs["texts"], strict=True):
        assert ours(text_reward, text) == found, text
    for text, found in zip(JSONS, theirs["jsons"], strict=True):
        read = ours(json_rewards, text)
        if read is not None and "reward" not in found:  # which only we add
            del read["reward"]
        assert read == (found or None), text  # no reward at all is none to us


def test_settings_have_the_packages_defaults(tmp_path):
    none, old, new = (read_settings(folder) for folder in written(tmp_path)[:3])
    assert (none.verifier_s, none.agent_s, none.image, none.environment) == (600.0, None, "", {})
    assert (old.verifier_s, old.agent_s) == (12.0, 0.5)
    assert (new.image, new.workdir, new.verifier_environment) == (
        "lab/sum:1",
        "/app",
        {"B": "x y"},
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[x", "task.toml is no TOML: "),
        ("verifier = 1", "verifier = 1 must be a table"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec = 0 must be a number above 0"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec = True must be a number above 0"),
        ("[environment]\ndocker_image = 1", "environment.docker_image = 1 must be a str"),
        ('[environment]\nos = "windows"', "environment.os = 'windows': only linux is run"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment: test.sh runs in"),
        ('[[steps]]\nname = "a"', "steps: only tasks of one step are read"),
        ('[verifier.env]\nA = "${HOME}"', "nothing of this machine's variables is shown to a task"),
        ('[verifier.env]\n"A B" = "1"', "verifier.env: 'A B' = '1' is no variable"),
        ("[solution.env]\nA = 1", "solution.env.A = 1 must be a text"),
    ],
)
def test_what_cannot_be_followed_is_named(text, why, tmp_path):
    with pytest.raises(NoTask) as found:
        read_settings(write(tmp_path, SUM, **{"task.toml": text}))
    assert why in str(found.value)


def test_files_to_ignore_are_refused(tmp_path):
    with pytest.raises(NoTask, match=r"tests/.harborignore cannot be followed"):
        read_settings(write(tmp_path, SUM, **{"tests/.harborignore": "*.log\n"}))
