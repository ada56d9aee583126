"""A start that fails claims nothing, so that the corrected one can use the same workdir."""

from __future__ import annotations

import pytest

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.run.config import RunConfig
from rl_code.tasks.row_files import TaskFileError
from rl_code.train import train


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mesh.data": 64}, ValueError, "a mesh of data=64 does not fit"),
        ({"model.weights": "no/such/folder"}, ConfigError, "no/such/folder"),
        (
            {
                "tasks": {"name": "mbpp", "split": "train", "path": "none.jsonl"},
                "tokenizer": {"source": "file", "path": "no/tokenizer.json"},
                "sft": None,
            },
            (ConfigError, TaskFileError),
            "no/tokenizer.json",
        ),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(tmp_path, changes, error, message):
    settings = quickstart.get_config("smoke")
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = settings
        for part in sections:
            section = section[part]
        section[name] = value
    with pytest.raises(error, match=message):
        train(build(RunConfig, settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
