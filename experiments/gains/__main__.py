"""Prints what the variants of a sweep gain on held-out tasks, and after how many updates.

    python -m experiments.gains runs/short_answers
    python -m experiments.gains runs/short_answers 10

runs/short_answers is the workdir of a sweep whose runs are evaluated while they train
(``evaluate.every``). The number is the gain that is waited for, in points; 20 without one. Only
finished runs count; nothing is run.
"""

from __future__ import annotations

from pathlib import Path

from experiments.gains import report
from launch import command
from sweeps.done import finished

_POINTS = 20.0


def main(argv: list[str]) -> None:
    try:
        (folder,), points = argv[1:2], float(*argv[2:]) if argv[2:] else _POINTS
    except (ValueError, TypeError):
        command.refuse(
            "name the workdir of a sweep, and the points if not 20, as in python -m "
            "experiments.gains runs/a 10"
        )
    variants: dict[str, list[Path]] = {}
    for workdir, _ in finished(Path(folder)):
        variants.setdefault(report.variant_of(workdir), []).append(workdir)
    if not variants:
        command.refuse(f"{folder} holds no finished run")
    command.console().print(report.gains(variants, points))


if __name__ == "__main__":
    command.run(main, arguments=True)
