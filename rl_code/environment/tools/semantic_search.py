"""semantic_search: the functions and classes that a question in words is about.

Words (BM25) and embeddings rank them together (``environment.search``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.search.chunks import package_folder
from rl_code.environment.search.index import Chunk
from rl_code.environment.search.library import Library, NotReady
from rl_code.environment.servers.companion import deadline_of
from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.text.lines import split_lines

_WIDTH = 80
_LONGEST = 400
_VERBOSE_LINES = 40
_VERBOSE_LONGEST = 8000


def describe(found: Sequence[Chunk], *, verbose: bool) -> str:
    """Chunks in words: with their text, or each on a line with its own first line."""
    if verbose:
        parts = []
        for chunk in found:
            lines = split_lines(chunk.text)
            more = len(lines) - _VERBOSE_LINES
            rest = [f"[{more} more lines]"] if more > 0 else []
            parts.append("\n".join([f"{chunk.path}:{chunk.first}", *lines[:_VERBOSE_LINES], *rest]))
        return cut_middle("\n\n".join(parts), _VERBOSE_LONGEST)
    lines = []
    for chunk in found:
        first = next(line for line in split_lines(chunk.text) if line.strip())
        lines.append(one_line(f"{chunk.path}:{chunk.first}: {first}", _WIDTH))
    return cut_middle("\n".join(lines), _LONGEST)


@dataclasses.dataclass(frozen=True)
class SemanticSearch(Tool):
    """Pieces of files that a question is about."""

    # Most pieces that are shown.
    most: int = 5
    # Most files that are searched: those that a grammar reads first.
    files: int = 10_000
    # Wall-clock seconds of one call; the first on a repository reads its files.
    seconds: float = 10.0
    # Packages of tree-sitter's grammars, by the ending of the files that they read. Others are cut
    # into windows of lines.
    grammars: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {".py": "tree_sitter_python"}
    )

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "semantic_search",
        "Find the functions and classes of the workspace that a question in words is about. Shows "
        "the best ones with file and line.",
        {"question": {"type": "string", "description": "What to look for, in words or names."}},
        ("question",),
    )
    documents: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("find", below={"question": "a question"})

    def __post_init__(self) -> None:
        if not (1 <= self.most <= 50 and 1 <= self.files <= 50_000 and 0 < self.seconds <= 60):
            raise ValueError(
                f"{self.most=} must be between 1 and 50, {self.files=} between 1 and 50000, "
                f"{self.seconds=} above 0 and at most 60"
            )
        for ending, package in self.grammars.items():
            if not ending.startswith("."):
                raise ValueError(f"grammars: {ending!r} must be an ending such as '.py'")
            package_folder(package)

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        grammars = dict(self.grammars)
        key = ("semantic_search", self.files, tuple(sorted(grammars.items())))
        library = workspace.pool.keep(key, lambda: Library(workspace.pool, grammars, self.files))
        try:
            index, left_out = library.index(workspace, deadline_of(workspace, self.seconds))
        except NotReady as error:
            return Result(str(error), ok=False)
        found = [] if index is None else index.search(arguments["question"], self.most)
        if not found:
            return Result("the files hold nothing" if workspace.verbose else "none", ok=False)
        text = describe(found, verbose=workspace.verbose)
        return Result(f"{text}\n{left_out} files not searched" if left_out else text)
