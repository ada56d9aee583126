"""The command ``rl-code``, in any folder once the project is installed.

``rl-code train --config=...`` is ``python -m launch.train --config=...``. Alone it lists
the commands.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from pathlib import Path

from launch import asks_for_help, begin

FOLDER = Path(__file__).parent


def main() -> None:
    """Runs the command that the first word names with the words behind it."""
    words = sys.argv[1:]
    if not words or asks_for_help(words[:1]):
        runpy.run_module("launch", run_name="__main__", alter_sys=True)
        return
    name, *rest = words
    known = commands()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        question = f" Did you mean {near[0]!r}?" if near else ""
        names = ", ".join(known)
        print(f"rl-code {name}: no such command.{question} There are {names}", file=sys.stderr)
        sys.exit(2)
    module = f"launch.{name}"
    begin(["-m", module, *rest])
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def commands() -> list[str]:
    """The modules of this folder that run as programs."""
    return [
        path.stem
        for path in sorted(FOLDER.glob("*.py"))
        if path.stem not in ("__main__", "console") and '"__main__":' in path.read_text()
    ]
