"""docs/operations.md quotes messages of the code; a message that changes must change there too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operations.md"


def templates() -> set[str]:
    """Every text of the code; "…" stands for its variable parts."""
    found = set()
    for folder in ("launch", "rl_code"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                    found.add("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def quoted() -> list[str]:
    """The messages that the tables of the page quote."""
    rows = re.findall(r'^\| (".*") \|', PAGE.read_text(), re.MULTILINE)
    return [message for row in rows for message in re.findall(r'"([^"]+)"', row)]


def test_every_message_of_the_page_is_one_of_the_code():
    code = templates()
    missing = []
    for message in quoted():
        pieces = [piece for piece in re.split(r"[…\s]*…[…\s]*", message) if len(piece) > 3]
        assert pieces, message
        pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
        if not any(pattern.search(text) for text in code):
            missing.append(message)
    assert not missing, "\n".join(missing)
    assert len(quoted()) > 35
