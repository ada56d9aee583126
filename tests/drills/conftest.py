"""Examples of docs/adding.md as packages outside of the tree."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding.md"
# A fenced block of Python whose first line names its file, as in ``# my_lab/losses.py``.
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files_of(section: str) -> dict[str, str]:
    """Path -> text of the files in a section of docs/adding.md. Raises KeyError for no such one."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return dict(BLOCK.findall(sections[section]))


@pytest.fixture
def outside(tmp_path, monkeypatch) -> Iterator[Callable[[str], Path]]:
    """Puts the files of a section into a folder on Python's path and returns the folder."""
    packages: set[str] = set()

    def put(section: str) -> Path:
        files = files_of(section)
        assert files, f"docs/adding.md: section {section!r} holds no file"
        for name, text in files.items():
            path = tmp_path / "outside" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            packages.add(name.split("/")[0].removesuffix(".py"))
        monkeypatch.syspath_prepend(str(tmp_path / "outside"))
        return tmp_path / "outside"

    yield put
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            del sys.modules[name]
