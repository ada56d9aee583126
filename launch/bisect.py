"""Says where two runs part first, and which of their inputs differ.

    python -m launch.bisect runs/a runs/b

It compares their records from the first step on: plans, sampled groups (tokens, log-probabilities,
results of tools, rewards), batches, and the weights after each update. It tells the first step,
group, trajectory and token that differ, and how config, code, libraries and machine differ there.
Exits with 1 when the runs part, with 0 when they are equal as far as both go. Steps that
``record.keep`` has removed from one of the records cannot be compared, and are named. Runs of other
trainers that ``launch.import_run`` has read are compared the same way.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

from launch import command, trusted
from rl_code.checkpoint.checkpoint import CheckpointError
from rl_code.config.read_config import ConfigError
from rl_code.recording.bisect import Comparison, compare
from rl_code.store.errors import StoreError


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        command.refuse("name the workdirs of two runs, as in python -m launch.bisect runs/a runs/b")
    one, other = map(Path, argv[1:])
    trusted.take(sys.argv)
    jax.config.update("jax_platforms", "cpu")  # no device is needed
    try:
        found = compare(one, other)
    except ConfigError as error:
        command.refuse(str(error))
    except (StoreError, CheckpointError) as error:
        sys.exit(str(error))
    tell(one, other, found)
    sys.exit(0 if found.parting is None else 1)


def tell(one: Path, other: Path, found: Comparison) -> None:
    """Prints what was found."""
    if found.parting is None:
        steps = found.steps
        print(
            f"{one} and {other} are equal in steps {steps.start} to {steps.stop - 1}, "
            f"{found.groups} groups; nothing but times was left out"
        )
        for run, own in zip((one, other), found.records, strict=True):
            if own.stop > steps.stop:
                print(f"{run} goes on to step {own[-1]}, which the other one has not done")
    else:
        print(f"{one} (there) and {other} (here) part {found.parting}")
        print(f"equal before: {found.groups} groups")
    for run, own in zip((one, other), found.records, strict=True):
        if own.start < found.steps.start:
            print(
                f"{run} begins at step {own.start}, which is not on record in the other one; "
                f"the steps before {found.steps.start} were not compared"
            )
    if found.gaps:
        print(
            f"only one of them has on record, so not compared: steps "
            f"{', '.join(map(str, found.gaps[:10]))}" + (" ..." if found.gaps[10:] else "")
        )
    if found.inputs:
        print("inputs that differ:", *found.inputs, sep="\n  ")
    else:
        print("no input that is recorded differs")


if __name__ == "__main__":
    command.run(main, arguments=True)
