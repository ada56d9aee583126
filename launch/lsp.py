"""A language server: suggestions of a served model in an editor, and what became of them.

    RL_CODE_KEY=... python -m launch.lsp --served_at=http://127.0.0.1:8000/v1

The editor starts it and speaks with it over standard input and output. It answers
textDocument/inlineCompletion, finds the next edit (the command rlCode.nextEdit), and reports to the
endpoint's /feedback what was shown, accepted, rejected and retained. With --jumps_at the next edit
may be in any open file: a second model, which may be served elsewhere, says where. The key is read
from the environment, since others can read the words of a command. Reports that the endpoint has
not acknowledged are kept in --outbox, and the next start sends those of a program that was killed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from absl import flags

from launch import command
from people.editor.clock import ManualClock
from people.editor.outbox import outbox_of
from people.editor.server import EditorConfig, EditorServer

SERVED_AT = flags.DEFINE_string("served_at", "http://127.0.0.1:8000/v1", "URL of the served model.")
MODEL = flags.DEFINE_string("suggests", "auto", "Name of the model, or auto.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "The most tokens of a suggestion.")
OPEN_FILES = flags.DEFINE_integer(
    "open_files",
    0,
    "The most other open files that are sent with a request, to a model with documents.",
    lower_bound=0,
)
JUMPS_AT = flags.DEFINE_string(
    "jumps_at",
    "",
    "URL of the served model that says where the next edit is, in any open file; '' for none. It "
    "is one that was trained with configs/tab_jumps.py.",
)
OUTBOX = flags.DEFINE_string(
    "outbox",
    None,
    "Folder for reports that are not acknowledged yet, of one person at one endpoint; '' for none. "
    "Unless given, one in $XDG_STATE_HOME or ~/.local/state.",
)
CLOCK = flags.DEFINE_enum(
    "clock", "machine", ["machine", "manual"], "manual: stands still until rlCode.moveClock."
)


def main(argv: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
    key = os.environ.get("RL_CODE_KEY", "")
    folder = outbox_of(SERVED_AT.value, key) if OUTBOX.value is None else OUTBOX.value
    config = EditorConfig(
        SERVED_AT.value,
        key,
        outbox=Path(folder) if folder else None,
        model=MODEL.value,
        max_tokens=MAX_TOKENS.value,
        open_files=OPEN_FILES.value,
        jumps_at=JUMPS_AT.value,
        jumps_outbox=_outbox_of_jumps(key),
    )
    clock = ManualClock() if CLOCK.value == "manual" else None
    try:
        server = EditorServer(config, clock)
    except ValueError as error:
        command.refuse(f"--served_at or --jumps_at: {error}")
    except OSError as error:
        command.refuse(f"--outbox={folder}: {error}")
    server.start_io()
    server.flush()  # an editor that died has not said so


def _outbox_of_jumps(key: str) -> Path | None:
    """The folder for reports about jumps: a name that the other's events do not have."""
    if not JUMPS_AT.value or OUTBOX.value == "":
        return None
    return Path(OUTBOX.value) / "jumps" if OUTBOX.value else outbox_of(JUMPS_AT.value, key)


if __name__ == "__main__":
    command.run(main)
