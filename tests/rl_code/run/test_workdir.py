"""Whose a workdir is, and what is advised where another config asks for it."""

from __future__ import annotations

import pytest

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.run import workdir
from rl_code.run.config import RunConfig


def config(**changes) -> RunConfig:
    settings = quickstart.get_config("smoke")
    for key, value in changes.items():
        with settings.unlocked():
            settings[key] = value
    return build(RunConfig, settings)


def test_a_run_that_is_to_go_on_on_other_devices_is_told_of_the_fork(tmp_path):
    run = tmp_path / "a run"
    run.mkdir()
    workdir.own(run, config())
    workdir.check(run, config())
    with pytest.raises(ConfigError, match=r"another config: .*mesh\.data = 2 there, 4") as error:
        workdir.check(run, config(mesh=dict(data=4)))
    assert str(error.value).endswith(
        f"\n    python -m launch.fork '{run}' --other_bits --config.mesh.data=4 "
        f"'--workdir={run}-fork'"
    )
    with pytest.raises(ConfigError, match="seed = 0 there, 7 here") as error:
        workdir.check(run, config(seed=7))
    assert "launch.fork" not in str(error.value)
