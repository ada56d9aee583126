"""The pages name what there is, and the README stays a front door."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")
# Paths in backticks: of a folder or of a file with an ending.
PATH = re.compile(
    r"`((?:launch|benchmarks|examples|experiments|configs|rl_code|models|attention|pallas_kernels|tests|docs)"
    r"/[\w./]*)`"
)


def anchor(title: str) -> str:
    """What a page's renderer makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target, heading in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert heading in map(anchor, titles), f"{page.name}: #{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page):
    text = page.read_text()
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []


def test_the_readme_is_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
