"""Runs that sample with a stand-in, for the tests that ask for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl_code.train import train
from tests.rl_code.recorded_runs import make_config, with_stand_in


@pytest.fixture(scope="module")
def stand_in():
    """Runs of the module train for real and sample with a stand-in (``recorded_runs``)."""
    with with_stand_in():
        yield


@pytest.fixture(scope="module")
def recorded(stand_in, tmp_path_factory) -> Path:
    """The workdir of a run one step off."""
    workdir = tmp_path_factory.mktemp("recorded")
    train(make_config("one_step", 1), workdir)
    return workdir


@pytest.fixture
def copy(recorded, tmp_path) -> Path:
    """Another workdir with the same run."""
    return shutil.copytree(recorded, tmp_path / "copy")
