"""Configs name their tasks or say what is wrong; the same config gives the same tasks."""

from __future__ import annotations

import json

import pytest

from rl_code import read_config
from rl_code.tasks.api import STREAM_LENGTH, TaskConfig, load, mutations
from rl_code.tasks.deduplicate import DuplicateConfig
from rl_code.tasks.differential import DifferentialConfig

GENERATED = {"source": "generated", "split": "train", "path": "", "seed": 0, "levels": (1,)}
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
    tasks, again = (load(TaskConfig(**GENERATED)) for _ in range(2))
    assert len(tasks) == STREAM_LENGTH
    assert (
        tasks[7] == again[7]
        and tasks[2:4] == [tasks[2], tasks[3]]
        and tasks[-1] == tasks[STREAM_LENGTH - 1]
    )
    with pytest.raises(IndexError):
        tasks[STREAM_LENGTH]


def test_near_duplicates_of_held_out_tasks_leave_training_only(tmp_path):
    config = GENERATED | {
        "source": "mbpp",
        "path": mbpp_file(tmp_path),
        "duplicates": DuplicateConfig(0.8, 0.8),
    }
    ids = {
        split: [task.id for task in load(TaskConfig(**config | {"split": split}))]
        for split in ("train", "test")
    }
    assert ids == {"train": ["MBPP/602"], "test": ["MBPP/404"]}
    every = load(TaskConfig(**config | {"duplicates": None}))
    assert [task.id for task in every] == ["MBPP/601", "MBPP/602"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "mbbp"}, "'mbbp' is not one of generated, mbpp, humaneval, evalplus"),
        ({"split": "dev"}, "'dev' is not one of train, validation, test"),
        ({"source": "humaneval"}, "has a test split only"),
        ({"source": "evalplus", "split": "test"}, "needs the section differential"),
        ({"visibel": 1}, "visible"),
        ({"form": "essay"}, "form"),
    ],
)
def test_a_wrong_config_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        read_config.build(TaskConfig, GENERATED | change)


def test_differential_tests_need_a_sandbox(tmp_path):
    config = TaskConfig(
        **GENERATED | {"source": "mbpp", "differential": DifferentialConfig(1, 1.0, 1)}
    )
    with pytest.raises(ValueError, match="need a sandbox and a workdir"):
        load(config)


def test_inputs_for_a_task_are_the_same_every_time(tmp_path):
    config = TaskConfig(**GENERATED | {"source": "mbpp", "path": mbpp_file(tmp_path)})
    first, again = (mutations(load(config)[0]) for _ in range(2))
    assert first == again and first
