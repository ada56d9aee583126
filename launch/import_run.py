"""Reads the run of another trainer from its dumps, so that it can be read, searched and compared.

    python -m launch.import_run --format=trl out/completions --workdir=runs/theirs
    python -m launch.import_run --format=verl rollouts --workdir=runs/theirs --tokenizer=weights/a
    python -m launch.import_run --format=prime_rl out --workdir=runs/theirs --tokenizer=weights/a
    python -m launch.report --workdir=runs/theirs --search="IndexError"
    python -m launch.bisect runs/theirs runs/other

Formats: trl, verl, verifiers, prime_rl, or package.module:object (docs/foreign_runs.md says what
each holds and what it lacks). Where a dump has token ids, --tokenizer names the folder of the run's
tokenizer, or --as_text takes its texts alone. The same command goes on with an import that was
stopped, and adds steps that the run has done since. Nothing of a dump is executed.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch import command, endings
from launch.workdir import WORKDIR
from rl_code.config.read_config import ConfigError
from rl_code.foreign.formats import FORMATS, find_format
from rl_code.foreign.importing import Imported, Settings, import_run
from rl_code.foreign.tokens import Encoder
from rl_code.store.errors import StoreError

FORMAT = flags.DEFINE_string(
    "format", None, f"Kind of the dump: {', '.join(FORMATS)}, or package.module:object."
)
SETTINGS = flags.DEFINE_string("format_settings", "{}", "Settings of the format, as JSON.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of the tokenizer of the run.")
AS_TEXT = flags.DEFINE_bool("as_text", False, "Take texts alone, and leave token ids out.")
SOLVED_FROM = flags.DEFINE_float(
    "solved_from",
    None,
    "Least reward of an episode that solved its task; unknown without it.",
)


def main(argv: list[str]) -> None:
    if not FORMAT.value:
        command.refuse(f"--format is missing; it is one of {', '.join(FORMATS)}")
    if not WORKDIR.value:
        command.refuse("--workdir=<folder> is missing, for instance --workdir=runs/theirs")
    if len(argv) < 2:
        command.refuse("name the files of the dump, or their folders")
    if problem := endings.refuse_workdir(WORKDIR.value):
        command.refuse(problem)
    settings = command.object_of("format_settings", SETTINGS.value)
    source = find_format(FORMAT.value, settings)
    encoder = Encoder.read(Path(TOKENIZER.value) if TOKENIZER.value else None)
    own = Settings(FORMAT.value, settings, encoder, SOLVED_FROM.value, AS_TEXT.value)
    try:
        found = import_run(source, [Path(path) for path in argv[1:]], Path(WORKDIR.value), own)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    tell(found)
    print(f"its files lack: {source.lacks}")
    print(f"next: {command.shown('launch.report', f'--workdir={WORKDIR.value}')}")


def tell(found: Imported) -> None:
    """Prints what was imported."""
    steps = found.steps
    print(
        f"{len(steps)} steps ({steps[0]} to {steps[-1]}), {found.new} of them new: "
        f"{found.groups} groups, {found.episodes} episodes, {found.tokens} tokens"
    )
    if found.sampled:
        print(
            f"{found.sampled} sampled tokens, {found.both} of them with the trainer's "
            "log-probabilities beside the sampler's"
        )
    else:
        print("no sampled tokens: what is stored are texts")
    if found.left_out:
        print(f"left out: {found.left_out}")


if __name__ == "__main__":
    command.run(main, arguments=True)
