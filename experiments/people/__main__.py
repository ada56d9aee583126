"""Predicts held-out decisions of real programmers about suggestions, and prints how well.

    python -m experiments.people --data=FOLDER --results=runs/people

FOLDER holds copilot_sessions.jsonl; RL_CODE_DATA names it where the flag is left out. The folder
``results`` then holds people.txt (the table) and calibration.png (the figure). With --fit=FILE it
predicts nothing, but fits what simulated programmers are drawn from on all decisions, and writes
that to the file.
"""

from __future__ import annotations

from pathlib import Path

import rich.console
from absl import flags as absl_flags

from experiments.people import report, study
from launch import command
from people.simulated import telemetry
from people.simulated.fit import Fit

_DATA = absl_flags.DEFINE_string("data", "", "Folder of copilot_sessions.jsonl.")
_RESULTS = absl_flags.DEFINE_string("results", "runs/people", "Folder of the table and the figure.")
_FIT = absl_flags.DEFINE_string("fit", "", "Only fit on all decisions, and write it to this file.")


def main(argv: list[str]) -> None:
    try:
        decisions = telemetry.read(telemetry.find_file(_DATA.value))
    except telemetry.TelemetryError as error:
        command.refuse(str(error))
    accepted = sum(one.accepted for one in decisions)
    people = len(telemetry.by_person(decisions))
    print(f"{len(decisions)} decisions of {people} people, {accepted} of them acceptances")
    if _FIT.value:
        Path(_FIT.value).write_text(Fit.of(decisions).to_json())
        return
    folder = Path(_RESULTS.value)
    folder.mkdir(parents=True, exist_ok=True)
    view = report.predictions(study.run(decisions))
    command.console().print(view)
    with open(folder / "people.txt", "w") as file:
        rich.console.Console(file=file, width=132).print(view)
    calibrations = {split: study.held_out_chances(decisions, split) for split in ("person", "time")}
    report.draw(calibrations, folder / "calibration.png")


if __name__ == "__main__":
    command.run(main)
