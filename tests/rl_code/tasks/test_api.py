"""Configs name their tasks or say what is wrong; the same config gives the same tasks."""

from __future__ import annotations

import json

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.tasks.deduplicate import DuplicateConfig
from rl_code.tasks.differential import DifferentialConfig, mutations
from rl_code.tasks.generated import Generated
from rl_code.tasks.mbpp import Mbpp
from rl_code.tasks.stream import STREAM_LENGTH

GENERATED = {"name": "generated", "split": "train", "levels": (1,)}
DESCRIPTIONS = {
    601: "minimum of two numbers",
    602: "reverse the words",
    511: "reverse a list",
    404: "minimum two numbers",
}


def mbpp_file(folder) -> str:
    row = {
        "prompt": "def f(a):\n",
        "canonical_solution": "    return a\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 2\n",
        "language": "python",
    }
    path = folder / "mbpp.jsonl"
    rows = [row | {"task_id": f"MBPP/{n}", "description": text} for n, text in DESCRIPTIONS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_generated_tasks_are_a_sequence_that_repeats_itself():
    tasks, again = (Generated("train", (1,)).load(None, None) for _ in range(2))
    assert len(tasks) == STREAM_LENGTH
    assert (
        tasks[7] == again[7]
        and tasks[2:4] == [tasks[2], tasks[3]]
        and tasks[-1] == tasks[STREAM_LENGTH - 1]
    )
    with pytest.raises(IndexError):
        tasks[STREAM_LENGTH]


def test_near_duplicates_of_held_out_tasks_leave_training_only(tmp_path):
    path = mbpp_file(tmp_path)
    ids = {
        split: [
            task.id
            for task in Mbpp(split, path, duplicates=DuplicateConfig(0.8, 0.8)).load(None, None)
        ]
        for split in ("train", "test")
    }
    assert ids == {"train": ["MBPP/602"], "test": ["MBPP/404"]}
    every = Mbpp("train", path).load(None, None)
    assert [task.id for task in every] == ["MBPP/601", "MBPP/602"]


MBPP = {"name": "mbpp", "split": "test", "path": "mbpp.jsonl"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (GENERATED | {"name": "mbbp"}, "tasks = 'mbbp'.*Did you mean 'mbpp'"),
        (GENERATED | {"split": "dev"}, "'dev' is not one of train, validation, test"),
        (GENERATED | {"levels": (9,)}, "must be some of"),
        (GENERATED | {"path": "x"}, r"tasks\.path: no such key"),
        ({"name": "humaneval", "split": "test"}, r"tasks\.split: no such key"),
        ({"name": "evalplus", "path": ""}, r"tasks\.differential: missing"),
        (MBPP | {"visibel": 1}, "Did you mean 'visible'"),
        (MBPP | {"form": "essay"}, r"tasks\.form = 'essay'"),
        ({"name": "json:loads"}, r"is no rl_code\.tasks\.source\.Source"),
    ],
)
def test_a_wrong_config_is_named(section, message):
    with pytest.raises(ConfigError, match=message):
        find_source(Named.from_config(section, "tasks"), "tasks")


def test_differential_tests_need_a_sandbox(tmp_path):
    source = Mbpp("train", mbpp_file(tmp_path), differential=DifferentialConfig(1, 1.0, 1))
    with pytest.raises(ValueError, match="need a sandbox and a workdir"):
        source.load(None, None)


def test_inputs_for_a_task_are_the_same_every_time(tmp_path):
    source = Mbpp("train", mbpp_file(tmp_path))
    first, again = (mutations(source.load(None, None)[0]) for _ in range(2))
    assert first == again and first
