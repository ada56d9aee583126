"""The files pyproject.toml of graded work, made of an agent's and the task's.

It takes a time without bound to read what an agent wrote there, so this runs in a disposable
process (sandbox/disposable.py): standard library only.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence

from rl_code.text.lines import split_lines

_TABLE = re.compile(r"\s*\[\[?\s*(?:\"([^\"]*)\"|'([^']*)'|([\w-]+))")


def merge(projects: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Path -> text of each file. projects: path -> text of the base, and the agent's."""
    return {path: project(*texts) for path, texts in projects.items()}


def project(base: str, own: str) -> str:
    """The text of a pyproject.toml: the agent's own, but with the tables ``tool`` of the base."""
    try:
        before = tomllib.loads(base)
        after = tomllib.loads(own)
    except tomllib.TOMLDecodeError:
        return base
    if before.get("tool") == after.get("tool"):
        return own
    text = _tables(own, of_tools=False) + "\n" + _tables(base, of_tools=True)
    try:
        merged = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return base
    wanted = {key: value for key, value in after.items() if key != "tool"}
    if "tool" in before:
        wanted["tool"] = before["tool"]
    return text if merged == wanted else base


def _tables(text: str, *, of_tools: bool) -> str:
    """The lines of a TOML file that belong to ``tool``, or those that do not."""
    kept = []
    of_tool = False
    for line in split_lines(text, keepends=True):
        if found := _TABLE.match(line):
            of_tool = "tool" in found.groups()
        if of_tool == of_tools:
            kept.append(line)
    return "".join(kept)
