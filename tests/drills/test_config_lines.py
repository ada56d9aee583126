"""The config lines of docs/adding.md work as they stand."""

from __future__ import annotations

import re
import textwrap

import pytest

from configs import quickstart
from rl_code.config import read_config
from rl_code.run.config import RunConfig
from tests.drills.conftest import PAGE

SECTIONS = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
# Indented lines that begin with "config." and those that they go on in.
LINES = re.compile(r"^    config\..*?(?=^(?:\s*$|    config\.))", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(title, textwrap.dedent(lines), id=f"{title}-{number}")
    for title, text in zip(SECTIONS[1::2], SECTIONS[2::2], strict=True)
    for number, lines in enumerate(LINES.findall(text))
]


# The config of the first is that of what people did, no run's; the second is no name of a config.
OTHERS = {"A signal of what people did", "A model family"}


def test_every_section_says_what_its_config_holds():
    assert {example.values[0] for example in EXAMPLES} | OTHERS == set(SECTIONS[1::2])


@pytest.mark.parametrize(("title", "lines"), EXAMPLES)
def test_config_lines_replace_names_of_a_shipped_config(outside, title, lines):
    outside(title)
    config = quickstart.get_config("smoke")
    with config.ignore_type():
        exec(lines, {"config": config})
    completed = read_config.complete(RunConfig, config)
    try:
        read_config.build(RunConfig, completed)
    except read_config.ConfigError as error:
        # the quickstart's tokenizer is trained on demonstrations, which other tasks and protocols
        # lack: the names were found, and what is wrong is said
        assert title in ("A source of tasks", "A protocol"), error
        assert "demonstrations" in str(error), error
