"""The pages name what there is, and the README stays a front door."""

from __future__ import annotations

import dataclasses
import re
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_code.config import read_config
from rl_code.run.config import RunConfig
from tests.syntax import outline_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Levels of headings that the site gives anchors.
LEVELS = runpy.run_path(str(ROOT / "docs" / "conf.py"))["myst_heading_anchors"]
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")
CODE = ("attention", "benchmarks", "cluster", "configs", "examples", "experiments", "launch",
        "models", "pallas_kernels", "people", "planner", "rl_code", "sweeps")  # fmt: skip
# What a docstring does not begin with: it says first what the thing is or does.
RIDDLE = re.compile(
    r"(What|Whether|How|Of|Where|Who|Whoever|Whose|Which|When|Why|That of|Those of)\b"
)
# Paths in backticks: of a folder or of a file with an ending.
PATH = re.compile(
    r"`((?:launch|planner|cluster|sweeps|benchmarks|examples|experiments|configs|rl_code|models|attention|pallas_kernels|people|tests|docs)"
    r"/[\w./]*)`"
)


def anchor(title: str) -> str:
    """What a page's renderer makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target, heading in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(rf"^#{{1,{LEVELS}}} (.*)$", file.read_text(), re.MULTILINE)
            assert heading in map(anchor, titles), f"{page.name}: #{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_exists(page):
    text = page.read_text()
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_table_of_contents_and_every_key_on_its_page():
    site = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    listed = {f"docs/{name}" for names in site["CONTENTS"].values() for name in names}
    below = "\n".join(site["contents"](f"docs/{name}") for name in ("results", "benchmarks"))
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT).with_suffix(""))
        assert name in listed or name.removeprefix("docs/") in below.splitlines(), name
    keys = list(site["usage"].keys(site["RunConfig"]))
    table = site["keys_page"](keys)
    assert len(keys) > 200 and all(f"| `{key.name}` | " in table for key in keys)


def test_code_names_pages_that_exist():
    named = re.compile(r"(?<![\w./])docs/[\w/]+\.md")
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    found = {(path, page) for path in files for page in named.findall(path.read_text())}
    assert [(path, page) for path, page in found if not (ROOT / page).exists()] == []


def test_what_is_to_be_read_in_an_afternoon_is_as_long_as_it_says():
    rows = re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", (ROOT / "docs/reading.md").read_text(), re.M)
    real = {path: len((ROOT / path).read_text().splitlines()) for path, _ in rows}
    assert len(rows) > 20 and sum(real.values()) < 9_000
    assert [(path, told) for path, told in rows if abs(real[path] - int(told)) > 40] == []


def test_the_readme_is_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_docstrings_begin_with_what_a_thing_is_or_does():
    found = []
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for text in outline_of(path).docstrings:
            if RIDDLE.match(text):
                found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found == []


def test_the_knobs_are_keys_of_a_config():
    """Those of the second column, of which one without a dot belongs to the section before it."""
    known = {key for cls, path in _sections(RunConfig, "") for key in _keys(cls, path)}
    rows = (ROOT / "docs" / "knobs.md").read_text().split("|---|---|---|---|\n")[1].splitlines()
    assert len(rows) >= 15
    wrong = []
    for row in rows:
        section = ""
        for found in re.findall(r"`([\w.]+)[`=]", row.split(" | ")[1]):
            key = found if found in known else f"{section}.{found}"
            section = key.rpartition(".")[0]
            if key not in known:
                wrong.append(found)
    assert wrong == []


def _sections(cls: type, path: str) -> Iterator[tuple[type, str]]:
    yield cls, path
    for name, hint in typing.get_type_hints(cls).items():
        if (section := read_config.section_of(hint)) is not None:
            yield from _sections(section, f"{path}{name}.")


def _keys(cls: type, path: str) -> Iterator[str]:
    return (f"{path}{field.name}" for field in dataclasses.fields(cls))
