"""The flag --workdir of every entry point that writes files."""

from __future__ import annotations

from absl import flags

WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run: one that was stopped continues from it, a bench removes what it put there.",
)
