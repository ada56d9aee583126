"""Writes the HTML report of a run, at any time, or of two runs side by side.

    python -m launch.report --workdir=runs/first
    python -m launch.report --workdir=runs/first --beside=runs/second --out=both.html
    python -m launch.report --workdir=runs/first --search="IndexError"

With --search the page holds the trajectories with that text, found among all that are on record;
the first of them are listed here too. The page is written into the workdir unless --out names a
file: report.html, report_beside.html with --beside, or report_search.html with --search. What the
record of each run takes on the disk is printed too.
"""

from __future__ import annotations

from pathlib import Path

import rich.table
import rich.text
from absl import flags as absl_flags

from launch import command
from launch.command import refuse
from launch.workdir import WORKDIR
from rl_code.report import about
from rl_code.report.page import write_report
from rl_code.report.trajectories import haystack, search_all
from rl_code.run.workdir import CONFIG_FILE, STORE
from rl_code.store.errors import StoreError

BESIDE = absl_flags.DEFINE_string("beside", None, "Workdir of a second run, shown beside it.")
SEARCH = absl_flags.DEFINE_string("search", "", "Text that the shown trajectories hold.")
OUT = absl_flags.DEFINE_string("out", None, "File to write.")
_LISTED = 20
_AROUND = 40


def main(_: list[str]) -> None:
    if not WORKDIR.value:
        refuse("--workdir=<folder of a run> is missing, for instance --workdir=runs/first")
    runs = [Path(folder) for folder in (WORKDIR.value, BESIDE.value) if folder]
    for run in runs:
        if not run.is_dir():
            refuse(f"{run} is not a folder; give the --workdir of a run that this machine can read")
        if not (run / CONFIG_FILE).is_file():
            refuse(f"{run} holds no run: it has no {CONFIG_FILE}; give the --workdir of a run")
    try:
        if SEARCH.value and not list_found(runs, SEARCH.value):
            refuse(f"no logged trajectory of {' or '.join(map(str, runs))} holds {SEARCH.value!r}")
        name = "report_search" if SEARCH.value else "report_beside" if BESIDE.value else "report"
        path = write_report(runs, OUT.value or runs[0] / f"{name}.html", search=SEARCH.value)
    except (ValueError, StoreError) as error:  # a damaged file, which the message names
        refuse(str(error))
    console = command.console()
    for run in runs:
        for what, value in about.record(run / STORE):
            console.print(f"{what} of {run}: {value}", soft_wrap=True, highlight=False)
    console.print(f"Report: {path}", soft_wrap=True)


def list_found(runs: list[Path], text: str) -> int:
    """Prints the first trajectories that hold the text; how many there are."""
    table = rich.table.Table(caption_justify="left")
    for column in ("run", "from", "task", "trajectory", "reward", "where"):
        table.add_column(column)
    names = about.names(runs)
    count = 0
    for source, group in search_all(dict(zip(names, runs, strict=True)), text):
        for sample in group["trajectories"]:
            count += 1
            if count <= _LISTED:
                number = f"{group['group']}/{sample['index']}"
                reward = f"{sample['reward']['total']:.2f}"
                place = around(haystack(group, sample), text)
                task = group["task_id"]
                table.add_row(source.run, source.label, task, number, reward, rich.text.Text(place))
    table.caption = f"{count} found" + (f", the first {_LISTED} shown" if count > _LISTED else "")
    if count:
        command.console().print(table)
    return count


def around(haystack: str, text: str) -> str:
    """The text where it stands first, on one line with what is before and behind it."""
    at = haystack.lower().index(text.lower())
    return " ".join(haystack[max(0, at - _AROUND) : at + len(text) + _AROUND].split())


if __name__ == "__main__":
    command.run(main)
