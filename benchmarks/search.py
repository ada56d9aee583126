"""Semantic search against grep: how often the wanted file is among the first that they show.

Two kinds of questions, both asked by no policy, over several numbers of files:

  faults      Generated repositories. The question is the message of the task, the wanted file the
              one with the fault. The message names the symptom, and the fault is as many imports
              away as its level says, so from level 1 on it must be found by what it does.
  functions   Files of Python's standard library. The question is the first line of a function's
              documentation, the wanted file the one with the function, from which its documentation
              was taken out.

Every way gives a list of files:

  grep name     ``def NAME`` with the name of the symptom; of faults only
  grep rarest   the word of the question that the fewest lines have
  grep words    any of the words of the question; files with most matches first
  words         BM25 alone
  sense         embeddings alone
  semantic      both, as the tool semantic_search
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import os
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks.results import define_counts, hardware, save
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.search.index import Chunk, Index
from rl_code.environment.search.library import Library
from rl_code.environment.tools.grep import search
from rl_code.environment.tools.workspace import Workspace
from rl_code.tasks.repositories import generate
from rl_code.text.lines import split_lines
from rl_code.types import Limits, Task, Tests

define_counts("sizes", ["10", "40", "160"], "Files of a repository, of search.")
flags.DEFINE_integer("repositories", 100, "Repositories of each size, of search.", lower_bound=1)

_LIMITS = Limits(10, 10_000, 1000, 10, 60.0, tools_s=1e6, tools_cpu_s=1e6)
_GRAMMARS = {".py": "tree_sitter_python"}
_WORD = re.compile(r"[a-z]{3,}")
# Bytes of the largest file of the standard library that is taken, and words of a question.
_LARGEST = 60_000
_FEWEST_WORDS = 5
_MATCHES = 10_000
_TOP = (1, 5)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about files, and which file answers it."""

    question: str
    wanted: str
    files: Mapping[str, str]
    # What the results are counted under, besides all together.
    kind: str
    # The name that the question is about; "" for none.
    name: str = ""


def main() -> None:
    console = rich.console.Console(width=130)
    report = measure()
    for name in report["recall"]:
        console.print(table(name, report["recall"][name]))
    console.print(f"load {report['load']}, {report['hardware']}", highlight=False)
    save(report)


def measure() -> dict:
    """By kind of question, size, way and level, the share of questions whose file is among the
    first.
    """
    options = flags.FLAGS
    report: dict = {"hardware": hardware(), "load": os.getloadavg()[0], "recall": {}}
    with SandboxPool(SandboxConfig(workspace_mb=32)) as pool:
        library = Library(pool, _GRAMMARS, 1000)
        for name, make in {"faults": faults, "functions": functions}.items():
            report["recall"][name] = {}
            for size in map(int, options.sizes):
                asked = make(size, options.repositories, options.seed)
                found = [ranked_files(one, pool, library) for one in asked]
                report["recall"][name][size] = {
                    way: recall(asked, [ranks[way] for ranks in found]) for way in found[0]
                }
        library.close()
    return report


def faults(size: int, count: int, seed: int) -> list[Question]:
    """Questions about generated repositories of so many files."""
    found = []
    for number in range(count):
        task = generate("test", seed, number, files=(size, size))
        message = str(task.messages[0]["content"])
        level = "levels 1 to 3" if task.meta["level"] else "level 0"
        found.append(Question(message, task.meta["cause"], task.files, level, task.entry_point))
    return found


def functions(size: int, count: int, seed: int) -> list[Question]:
    """Questions about so many files of the standard library, drawn anew for each."""
    rng = random.Random(f"functions/{seed}/{size}")
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py"))]
    texts = {
        str(path.relative_to(folder)): path.read_text()
        for path in paths
        if path.stat().st_size < _LARGEST and not {"site-packages", "test"} & set(path.parts)
    }
    found: list[Question] = []
    while len(found) < count:
        files = {path: texts[path] for path in sorted(rng.sample(sorted(texts), size))}
        documented = [(path, one) for path in files for one in _documented(files[path])]
        if documented:
            path, function = rng.choice(documented)
            question = split_lines(ast.get_docstring(function) or "")[0]
            without = {**files, path: _without(files[path], function)}
            found.append(Question(question, path, without, "functions"))
    return found


def _documented(text: str) -> list[ast.FunctionDef]:
    """The functions of a file whose documentation begins with a line of some words."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and len((ast.get_docstring(node) or "").partition("\n")[0].split()) >= _FEWEST_WORDS
        and len(node.body) > 1
    ]


def _without(text: str, function: ast.FunctionDef) -> str:
    """The file without a function's documentation."""
    lines = split_lines(text, keepends=True)
    written = function.body[0]
    return "".join(lines[: written.lineno - 1] + lines[written.end_lineno or 0 :])


def ranked_files(asked: Question, pool: SandboxPool, library: Library) -> dict[str, list[str]]:
    """By way, the files in the order in which it shows them."""
    task = Task("search", (), asked.files, "a.py", "f", Tests(), Tests(), {})
    workspace = Workspace(task, pool, _LIMITS, verbose=True)
    try:
        index, _ = library.index(workspace, time.monotonic() + 600.0)
        if index is None:
            raise ValueError("the files hold nothing")
        words = sorted(set(_WORD.findall(asked.question.lower())))
        found = {"grep name": grep(workspace, f"def {asked.name}")} if asked.name else {}
        found["grep rarest"] = grep(workspace, _rarest(asked.files, words))
        found["grep words"] = grep(workspace, rf"(?i)\b({'|'.join(words)})\b", by_matches=True)
        for way, rank in _INDEXED.items():
            found[way] = files_of(rank(index, asked.question))
        return found
    finally:
        workspace.close()


def _rarest(files: Mapping[str, str], words: Sequence[str]) -> str:
    """The pattern of the word that the fewest lines have; of those that some line has."""
    lines = [line.lower() for text in files.values() for line in split_lines(text)]
    counts = {word: sum(word in line for line in lines) for word in words}
    known = [word for word in words if counts[word]]
    return f"(?i){min(known, key=counts.__getitem__)}" if known else r"\Z\A."


def _all(index: Index, scores: np.ndarray) -> list[Chunk]:
    return index.best(scores, _MATCHES)


_INDEXED: Mapping[str, Callable[[Index, str], list[Chunk]]] = {
    "words": lambda index, question: _all(index, index.by_words(question)),
    "sense": lambda index, question: _all(index, index.by_sense(question)),
    "semantic": lambda index, question: index.search(question, _MATCHES),
}


def grep(workspace: Workspace, pattern: str, *, by_matches: bool = False) -> list[str]:
    """Files with matches, in the order of the tool, or those with most matches first."""
    found = search(workspace, pattern, most=_MATCHES, seconds=60.0)
    if found.error:
        raise RuntimeError(found.error)
    counts = collections.Counter(match.path for match in found.matches)
    return [path for path, _ in counts.most_common()] if by_matches else list(counts)


def files_of(chunks: Iterable[Chunk]) -> list[str]:
    """The files of chunks, each where its first chunk stands."""
    return list(dict.fromkeys(chunk.path for chunk in chunks))


def recall(
    asked: Sequence[Question], ranked: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """For all questions and for each kind, how often the wanted file is among the first ones."""
    kinds = sorted({one.kind for one in asked})
    shares = {}
    for name, chosen in {"all": kinds, **{kind: [kind] for kind in kinds}}.items():
        places = [
            paths.index(one.wanted) if one.wanted in paths else len(one.files)
            for one, paths in zip(asked, ranked, strict=True)
            if one.kind in chosen
        ]
        shares[name] = {f"@{top}": sum(at < top for at in places) / len(places) for top in _TOP}
        shares[name]["count"] = len(places)
    return shares


def table(name: str, sizes: dict) -> rich.table.Table:
    """Percent of the questions whose file is among the first, one way a line."""
    columns = list(next(iter(next(iter(sizes.values())).values())))
    columns = columns if len(columns) > 2 else ["all"]
    shown = rich.table.Table("files", "way", title=name)
    for column in columns:
        for top in _TOP:
            shown.add_column(f"{column} @{top}", justify="right")
    for size, ways in sizes.items():
        for way, shares in ways.items():
            row = [
                f"{100 * shares[column][f'@{top}']:.0f}" if column in shares else ""
                for column in columns
                for top in _TOP
            ]
            shown.add_row(str(size), way, *row)
    return shown
