"""Generated tasks come out the same in another process, in which texts have other hashes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rl_code.tasks import generated, lookup, repositories
from rl_code.tasks.programs import SPLITS
from rl_code.types import Task

SHORT = lookup.Size(tokens=300, files=6, matter=2, spacing=30)
# How each source makes some tasks of a split.
SOURCES = {
    "generated": lambda split, i: generated.generate(split, 7, i, (1, 2, 3, 4)),
    "lookup": lambda split, i: lookup.generate(split, 7, i, SHORT),
    "repositories": lambda split, i: repositories.generate(split, 7, i),
}
COUNT = 12


def tasks_of(source: str) -> Iterator[Task]:
    return (SOURCES[source](split, i) for split in SPLITS for i in range(COUNT))


def fingerprints() -> dict[str, str]:
    """Equal for equal tasks of each source."""
    found = {source: repr(list(tasks_of(source))) for source in SOURCES}
    return {source: hashlib.sha256(text.encode()).hexdigest() for source, text in found.items()}


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, str]:
    """The fingerprints in a process of its own."""
    script = f"import json\nfrom {__name__} import fingerprints\nprint(json.dumps(fingerprints()))"
    path = os.pathsep.join(filter(None, sys.path))
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(out.stdout)


def test_the_same_arguments_give_the_same_tasks_in_every_process(elsewhere):
    assert elsewhere == fingerprints()
    assert len({*elsewhere.values()}) == len(SOURCES)
