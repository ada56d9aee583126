"""Counts of what makes files hard to read, for the signal ``quality``.

An agent wrote these files, so this runs in a disposable process: standard library only.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_code.text.lines import split_lines

# Diagnostics that count: errors and warnings of pycodestyle but the length of lines, pyflakes,
# bugbear, pylint's errors and warnings. And complexity, which is read from its diagnostic.
_RULES = "E,W,F,B,PLE,PLW"
_IGNORED = "E501,W191,W291,W292,W293,W391"
_COMPLEXITY = re.compile(r"is too complex \((\d+) > 0\)")
# Comments that hide diagnostics of the usual tools.
_SUPPRESSION = re.compile(
    r"#\s*(noqa|type:\s*ignore|pyright:|ty:\s*ignore|pylint:\s*disable)", re.I
)
# Lines of a run that counts as repeated.
_WINDOW = 4
# CPU and wall-clock seconds of ruff, and bytes of what it says: 20,000 diagnostics or more.
_SECONDS = 20
_SAID_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Measure:
    """Counts over a set of Python files."""

    # Diagnostics and suppressions.
    diagnostics: int = 0
    # McCabe's, summed over functions.
    complexity: int = 0
    # Runs of lines that stand somewhere before, too.
    repeated: int = 0
    # Lines that are not blank.
    lines: int = 0

    def beyond(self, other: Measure) -> Measure:
        """Excess over another measure, item by item, at least 0 each."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Measure(*(max(0, one - two) for one, two in pairs))


def measures(folder: str, trees: Sequence[Sequence[str]], ruff: str) -> list[tuple[int, ...]]:
    """The fields of the measure of several sets of files. Raises ValueError and SubprocessError
    where ruff does not get to its end.

    folder: holds the files, each as ``number of the set/index.py``. ruff: its program.
    """
    diagnostics = collections.Counter[int]()
    complexity = collections.Counter[int]()
    for one in _said(folder, ruff):
        number = int(Path(one["filename"]).parent.name)
        if points := _COMPLEXITY.search(one["message"]):
            complexity[number] += int(points[1])
        else:
            diagnostics[number] += 1
    found = [
        Measure(
            diagnostics[number] + sum(len(_SUPPRESSION.findall(text)) for text in texts),
            complexity[number],
            _repeated(texts),
            sum(bool(line.strip()) for text in texts for line in split_lines(text)),
        )
        for number, texts in enumerate(trees)
    ]
    return [dataclasses.astuple(one) for one in found]


def _said(folder: str, ruff: str) -> Iterator[dict[str, str]]:
    """The diagnostics of all files in a folder, as they come. Raises as ``measures``."""
    command = [
        ruff, "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero",
        "--select", f"{_RULES},C901", "--ignore", _IGNORED, "--output-format", "json-lines",
        "--config", "lint.mccabe.max-complexity=0", folder,
    ]  # fmt: skip
    # A thread for each of many processors would not fit into the memory of this process.
    few = {"RAYON_NUM_THREADS": "2"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=few
    ) as process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            assert process.stdout is not None
            left = _SAID_BYTES
            while line := process.stdout.readline(left):
                left -= len(line)
                if left <= 0:
                    raise ValueError(f"ruff says more than {_SAID_BYTES} bytes")
                yield json.loads(line)
            if process.wait(_SECONDS):
                raise ValueError(f"ruff ended with exit code {process.returncode}")
        finally:
            process.kill()


def _repeated(texts: Sequence[str]) -> int:
    """Runs of ``_WINDOW`` lines, blank ones and indentation aside, that stand somewhere before."""
    seen = set()
    count = 0
    for text in texts:
        lines = [line.strip() for line in split_lines(text) if line.strip()]
        for start in range(len(lines) - _WINDOW + 1):
            run = tuple(lines[start : start + _WINDOW])
            count += run in seen
            seen.add(run)
    return count
