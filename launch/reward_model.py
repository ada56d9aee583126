"""Makes a reward model of the outcomes of recorded runs, and judges it on tasks held out from it.

    python -m launch.reward_model --config=configs/reward_model.py --workdir=runs/reward_model
    python -m launch.reward_model --config=configs/reward_model.py:truth --workdir=runs/truth

The model reads the task and the change of the work; with sight of the ground truth (:truth, or
--config.reading.sees_reference) also the change of the reference. --config.fit.kind=pairs trains it
on pairs of one task instead of single outcomes. The folder gets report.json, and reliability.png
with its calibration on held-out tasks. A run is then paid by it with the signal
dict(name="reward_model", folder="runs/reward_model").

Calls on record are carried out again in sandboxes where the record holds no changes.
"""

from __future__ import annotations

from pathlib import Path

import ml_collections

from launch import flags
from launch.command import console
from rl_code.config import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.recording.reward_models import RewardModelConfig, make, quality_of
from rl_code.report.reliability import draw
from rl_code.store.errors import StoreError


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    settings = read_config.build(RewardModelConfig, config)
    folder = Path(str(workdir))
    report = make(settings, folder)
    quality = quality_of(report)
    draw(quality, folder / "reliability.png")
    within = "" if quality.auc_within is None else f" (within tasks {quality.auc_within:.3f})"
    console().print(
        f"{report['texts']['trained']} texts of {report['tasks']['trained']} tasks; held out "
        f"{quality.count} of {report['tasks']['held_out']}, {quality.good} good: "
        f"AUC {quality.auc:.3f}{within}, calibration error {quality.ece:.3f}, "
        f"Brier {quality.brier:.3f}. {folder / 'reliability.png'}",
        highlight=False,
    )


if __name__ == "__main__":
    flags.run(main, kind=RewardModelConfig, expected=(SandboxUnavailable, StoreError))
