"""Settings of Sphinx, which makes a site of the Markdown pages: ``bash launch/docs.sh``.

The pages are plain Markdown and read well by themselves. A site has two things more: a table of
contents, and on docs/config_keys.md the keys of configs, as ``--help`` prints them.
"""

import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch import usage  # noqa: E402
from rl_code.run.config import RunConfig  # noqa: E402

# Title -> pages, in the order of reading. Pages in a folder of a page's name follow that page.
CONTENTS = {
    "Begin": ("install", "first_run", "own_model", "my_tasks", "no_reward"),
    "Use": ("commands", "knobs", "config_keys", "many_devices", "vllm", "operations"),
    "Agents": ("environment", "agents_of_others", "redteam", "foreign_tasks", "foreign_runs"),
    "People": (
        "learning_from_people",
        *("serving", "tinker", "feedback", "realtime", "production", "editors"),
    ),
    "Change": ("reading", "adding", "architecture", "glossary", "../CONTRIBUTING"),
    "Measured": ("results", "benchmarks", "on_device", "../CHANGELOG", "licences"),
}

project = html_title = "rl-code"
extensions = ["myst_parser"]
root_doc = "README"
# pages are those of the top folder and of docs/
exclude_patterns = [
    path.name for path in ROOT.iterdir() if path.suffix != ".md" and path.name != "docs"
]
highlight_language = "text"
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False


def keys_page(keys: Iterable[usage.Key]) -> str:
    """The tables of a config's keys, one for each section, as Markdown."""
    lines = []
    for section, members in itertools.groupby(keys, lambda key: re.match(r"\w+", key.name)[0]):
        lines += [f"## `{section}`", ""]
        lines += ["| key | is | unless set | meaning |", "|---|---|---|---|"]
        for key in members:
            name, *words = (text.replace("|", r"\|") for text in dataclasses.astuple(key))
            lines.append(f"| `{name}` | {' | '.join(words)} |")
        lines.append("")
    return "\n".join(lines)


def contents(page: str) -> str:
    """The part of the table of contents that hangs on a page, as MyST writes it."""
    if page == "README":
        pages = {
            title: [f"docs/{name}".replace("docs/../", "") for name in names]
            for title, names in CONTENTS.items()
        }
    else:
        below = sorted((ROOT / page).glob("*.md"))
        pages = {"Pages": [f"{path.parent.name}/{path.stem}" for path in below]} if below else {}
    return "\n".join(
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"
        for title, names in pages.items()
    )


def _complete(app, page: str, text: list[str]) -> None:
    if page == "docs/config_keys":
        text[0] += "\n" + keys_page(usage.keys(RunConfig))
    text[0] += "\n" + contents(page)


def _begin_at_the_readme(app, error) -> None:
    (Path(app.outdir) / "index.html").write_text(
        '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
    )


def setup(app) -> None:
    app.connect("source-read", _complete)
    app.connect("build-finished", _begin_at_the_readme)
