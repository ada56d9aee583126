"""JSON files with one object, as Hugging Face's folders hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError, which names the file, when it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
