"""Runs the supervised warm start of a config alone; launch.train then goes on from it.

python -m launch.sft --config=configs/quickstart.py[:smoke] --workdir=runs/first
"""

from __future__ import annotations

from pathlib import Path

import jax
import ml_collections

from launch import flags
from models.sharding import row_shards
from rl_code import sft
from rl_code.config import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.host.stop import StopRequest
from rl_code.run.config import RunConfig, check_rows, meshes
from rl_code.run.run import Run


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    if run_config.sft is None:
        raise read_config.ConfigError("config.sft = None: this config has no warm start")
    flags.use_virtual_devices(*meshes(run_config))
    with Run(run_config, Path(workdir)) as run, jax.set_mesh(run.mesh), StopRequest() as stop:
        check_rows(run_config, row_shards(run.mesh))
        sft.warm_start(run, stop)


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, expected=(SandboxUnavailable,), lasting=(FloatingPointError,))
