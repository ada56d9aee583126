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
    for folder in ("launch", "cluster", "sweeps", "people", "rl_code", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            constants = texts_of(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = [part_of(value, constants) for value in node.values]
                    found.add("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def texts_of(tree: ast.Module) -> dict[str, str]:
    """Name -> text of a module's own constants, such as the config key that its messages begin with."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def part_of(value: ast.expr, constants: dict[str, str]) -> str:
    """The text of a part of an f-string; "…" where it varies."""
    if isinstance(value, ast.Constant):
        return value.value
    if isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Name):
        return constants.get(value.value.id, "…")
    return "…"


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
