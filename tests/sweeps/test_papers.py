"""The table of papers is whole, its page is made from it, and what is missing runs once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rl_code.config.read_config import ConfigError
from sweeps import papers
from sweeps.papers import Paper

ROOT = Path(__file__).resolve().parents[2]
TABLE = papers.read()
WANTED = (
    *("grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "pkpo", "decoupled", "vineppo"),
    *("sdpo", "nsa", "moba", "block_attention", "prefix_grouper", "text_feedback"),
    "compaction_rl",
)


class Never:
    """No interrupt comes."""

    count = 0


def row(**changes) -> Paper:
    given = {"name": "one", "title": "One", "arxiv": "2401.00001", "claim": "a", "expected": "b"}
    return Paper(**given | {"commands": ("python -m launch.papers",)} | changes)


def test_the_papers_are_in_the_table():
    assert set(WANTED) <= {paper.name for paper in TABLE}


@pytest.mark.parametrize("paper", TABLE, ids=lambda paper: paper.name)
def test_a_row_names_files_that_exist(paper):
    assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv)
    for name in filter(None, (*paper.configs, paper.page)):
        assert (ROOT / name).is_file(), name
    text = " ".join(paper.commands)
    for name in re.findall(r"--config=([\w/.]+)", text):
        assert name in paper.configs
    for module in re.findall(r"python -m ([\w.]+)", text):
        file = ROOT / module.replace(".", "/")
        assert file.is_dir() or file.with_suffix(".py").is_file() or module == "pytest"


def test_the_page_is_made_from_the_table():
    assert (ROOT / "docs/results/papers.md").read_text() == papers.page(TABLE, "runs/papers")


@pytest.mark.parametrize("paper", TABLE, ids=lambda paper: paper.name)
def test_a_commit_of_a_row_stands_on_its_page(paper):
    if paper.commits:
        pages = [ROOT / paper.page, *(ROOT / "docs" / "results").glob("*.md")]
        text = "".join(path.read_text() for path in pages if path.name != "papers.md")
        assert [commit for commit in paper.commits if commit not in text] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "two words"}, "name='two words' must be letters"),
        ({"commands": ()}, "commands=() must name what measures it"),
        ({"measured": "x"}, "measured='x' with commits=()"),
        ({"measured": "x", "commits": ("abc",)}, "needs a page"),
        ({"commands": ("bash x",)}, "'bash x' must begin with python -m"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        row(**changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "no table of papers"),
        ("[[paper]]\nname = 'one'\nyear = 2", "unknown key 'year'"),
        ("[[paper]]\nname = 'one'", "the paper one: .*missing"),
    ],
)
def test_a_table_with_a_mistake_is_refused(tmp_path, text, words):
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        papers.read(path)


def test_states_of_a_row():
    assert row().result == "not run"
    assert row(measured="+2", commits=("abc",), page="docs/x.md").result == "+2"


def test_missing_are_those_that_nobody_ran_and_those_asked_for(tmp_path):
    new = row(name="new")
    known = row(name="known", measured="+2", commits=("abc",), page="docs/x.md")
    every = [new, known]
    assert papers.missing(every, tmp_path, ()) == [new]
    assert papers.missing([known], tmp_path, ["known"]) == [known]
    with pytest.raises(ConfigError, match="--only=nwe: no such paper; there are new, known"):
        papers.select(every, ["nwe"])


def test_a_paper_runs_once_and_goes_on_at_the_command_that_failed(tmp_path):
    """Each command lists a zip file of its name, which fails where there is none."""
    commands = tuple(f"python -m zipfile -l {{workdir}}/{name}" for name in "ab")
    paper = row(commands=commands)
    empty_zip = b"PK\5\6" + bytes(18)
    (tmp_path / "a").write_bytes(empty_zip)
    said: list[str] = []
    run = lambda: papers.run(paper, tmp_path, "abc", Never(), said.append)  # noqa: E731
    assert run() != 0 and papers.done(paper, tmp_path) is None
    (tmp_path / "b").write_bytes(empty_zip)
    assert run() == 0
    found = papers.done(paper, tmp_path)
    assert found["commit"] == "abc" and papers.missing([paper], tmp_path, ["one"]) == []
    assert said[-1] == f"one 2/2: python -m zipfile -l {tmp_path}/b"
    other = dataclasses.replace(paper, commands=commands[:1])
    assert papers.done(other, tmp_path) is None  # it was measured otherwise


def test_an_interrupt_ends_the_command_and_the_paper(tmp_path):
    class Once:
        looks = 0

        @property
        def count(self) -> int:
            self.looks += 1
            return int(self.looks > 2)

    paper = row(commands=("python -m http.server 0 --bind 127.0.0.1",))
    with pytest.raises(KeyboardInterrupt):
        papers.run(paper, tmp_path, "abc", Once(), lambda words: None)
    assert papers.done(paper, tmp_path) is None
