"""The table of papers that are reproduced here: its rows, its page, and the runs that it lacks.

The rows are data, ``configs/papers/table.toml``. A row that names no ``measured`` was not run.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically
from rl_code.host.stop import INTERRUPTED

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "configs" / "papers" / "table.toml"
# The word of a command that stands for the folder of all runs.
WORKDIR = "{workdir}"
NOT_RUN = "not run"
# Seconds between two looks at a command that runs.
_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True)
class Paper:
    """A row of the table."""

    # Its name on the command line.
    name: str
    title: str
    arxiv: str
    # Sentence that the paper claims, in our words.
    claim: str
    # Result that is expected at this size.
    expected: str
    # Commands that measure it, one after another.
    commands: tuple[str, ...]
    # Files of the configs, as on the command line.
    configs: tuple[str, ...] = ()
    # Result of the runs so far; "" where nobody ran it.
    measured: str = ""
    # Commits at which that was measured.
    commits: tuple[str, ...] = ()
    # Page with the whole result; "" where there is none yet.
    page: str = ""

    def __post_init__(self) -> None:
        wrong = ""
        if not self.name.isidentifier():
            wrong = f"name={self.name!r} must be letters, digits and underscores"
        elif not self.commands:
            wrong = "commands=() must name what measures it"
        elif bool(self.measured) != bool(self.commits):
            wrong = f"measured={self.measured!r} with commits={self.commits}: both or neither"
        elif self.measured and not self.page:
            wrong = "what was measured needs a page"
        elif others := [line for line in self.commands if not line.startswith("python -m ")]:
            wrong = f"the command {others[0]!r} must begin with python -m"
        if wrong:
            raise ConfigError(f"the paper {self.name}: {wrong}")

    @property
    def result(self) -> str:
        """Text of the column "measured"."""
        return self.measured or NOT_RUN

    def shown_commands(self, workdir: str) -> list[str]:
        """The commands with their folder."""
        return [line.replace(WORKDIR, workdir) for line in self.commands]


def read(path: Path = TABLE) -> list[Paper]:
    """The rows in the order of the file. Raises ConfigError for one that is not as it must be."""
    try:
        rows = tomllib.loads(path.read_text())["paper"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{path} is no table of papers: {error}") from error
    papers = [_paper(row) for row in rows]
    names = [paper.name for paper in papers]
    if twice := [name for at, name in enumerate(names) if name in names[:at]]:
        raise ConfigError(f"{path} has the paper {twice[0]} twice")
    return papers


def _paper(row: Mapping[str, Any]) -> Paper:
    fields = {field.name for field in dataclasses.fields(Paper)}
    if unknown := sorted(set(row) - fields):
        raise ConfigError(f"the paper {row.get('name')}: unknown key {unknown[0]!r}")
    made: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    try:
        return Paper(**made)
    except TypeError as error:
        raise ConfigError(f"the paper {row.get('name')}: {error}") from error


def select(papers: Sequence[Paper], names: Collection[str]) -> list[Paper]:
    """The papers of these names, all where none is given. Raises ConfigError for unknown names."""
    known = [paper.name for paper in papers]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only={unknown[0]}: no such paper; there are {', '.join(known)}")
    return [paper for paper in papers if not names or paper.name in names]


# --- Runs -----------------------------------------------------------------------------------------


def done(paper: Paper, workdir: Path) -> dict[str, Any] | None:
    """Record of all commands of a paper that have ended well in a folder; None where some have not,
    or were other commands.
    """
    path = _record(paper, workdir)
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return found if found["commands"] == list(paper.commands) else None


def missing(papers: Sequence[Paper], workdir: Path, asked: Collection[str]) -> list[Paper]:
    """The papers to run: those that nobody ran, here or elsewhere.

    asked: names that were asked for, which are run here wherever else they were measured.
    """
    return [
        paper
        for paper in papers
        if (not paper.measured or paper.name in asked) and done(paper, workdir) is None
    ]


class Interruptions(Protocol):
    """Counter of Ctrl-C and SIGTERM, as ``sweeps.running.Interrupts``."""

    count: int


def run(
    paper: Paper,
    workdir: Path,
    commit: str,
    interrupts: Interruptions,
    say: Callable[[str], None],
) -> int:
    """Runs the commands of a paper one after another; returns the exit code of the first that
    fails, else 0.

    A command that was stopped goes on from its workdir, and one that has ended does little. When
    all have ended well, that is written down. An interrupt is passed on to the command; raises
    KeyboardInterrupt when it has ended.
    """
    begin = time.time()
    lines = paper.shown_commands(str(workdir))
    for number, line in enumerate(lines, start=1):
        say(f"{paper.name} {number}/{len(lines)}: {line}")
        code = _follow(line, interrupts)
        if code == INTERRUPTED or interrupts.count:
            raise KeyboardInterrupt
        if code:
            return code
    seconds = time.time() - begin
    found = {"commands": list(paper.commands), "commit": commit, "seconds": seconds}
    write_atomically(_record(paper, workdir), (json.dumps(found, indent=1) + "\n").encode())
    return 0


def _follow(line: str, interrupts: Interruptions) -> int:
    """Runs a command in a process group of its own to its end; returns the exit code."""
    _, *words = shlex.split(line)
    told = interrupts.count
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, process_group=0)
    while (code := process.poll()) is None:
        if interrupts.count > told:
            told = interrupts.count
            process.terminate()
        time.sleep(_LOOK_S)
    return code


def _record(paper: Paper, workdir: Path) -> Path:
    return workdir / f"{paper.name}.json"


# --- The page -------------------------------------------------------------------------------------


def page(papers: Sequence[Paper], workdir: str) -> str:
    """The table as a page of docs/results."""
    counts = [
        sum(bool(paper.measured) for paper in papers),
        sum(paper.result == NOT_RUN for paper in papers),
    ]
    lines = [
        "# Papers",
        "",
        "Claims of papers, and what came out here. This page is made from",
        "`configs/papers/table.toml` by `python -m launch.papers --page=docs/results/papers.md`;",
        "`python -m launch.papers --run` runs what nobody ran, `--only=dapo` one of them.",
        "",
        "| | |",
        "|---|---|",
        "| config | `configs/papers/table.toml` |",
        "| command | `python -m launch.papers` |",
        "| hardware | 2 CPU cores |",
        "| expected | the column of that name |",
        f"| measured | {counts[0]} papers measured, {counts[1]} not run |",
        "| commit | the column of that name |",
        "",
        "| name | paper | claim | expected here | measured | commit |",
        "|---|---|---|---|---|---|",
    ]
    for paper in papers:
        result = paper.result
        if paper.page:
            result = f"[{result}]({_relative(paper.page)})"
        cells = (
            f"`{paper.name}`",
            f"[{paper.title}](https://arxiv.org/abs/{paper.arxiv})",
            paper.claim,
            paper.expected,
            result,
            ", ".join(paper.commits),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "The commands, and the configs that they read:", ""]
    for paper in papers:
        names = ", ".join(f"`{config}`" for config in paper.configs)
        lines += [f"## {paper.name}", "", *([names, ""] if names else [])]
        lines += [f"    {line}" for line in paper.shown_commands(workdir)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _relative(page: str) -> str:
    """Link from docs/results to another page of docs."""
    folder, _, name = page.removeprefix("docs/").rpartition("/")
    return name if folder == "results" else f"../{folder}/{name}" if folder else f"../{name}"
