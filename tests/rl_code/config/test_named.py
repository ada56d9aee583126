"""Names in a config: entries of a family, objects from outside, settings, and clear refusals."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from rl_code.config import read_config
from rl_code.config.named import Named, find, make
from rl_code.config.read_config import ConfigError
from rl_code.environment.tools.api import TOOLS
from rl_code.environment.tools.tool import Tool
from rl_code.harness.agent import Agent
from rl_code.harness.api import HARNESSES
from rl_code.tasks.api import SOURCES
from rl_code.tasks.source import Source


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: float = 2.0

    def __call__(self, x: float) -> float:
        return self.factor * x


def plain(x: float) -> float:
    return x


FAMILY = {"scaled": Scaled, "plain": plain}


@dataclasses.dataclass(frozen=True)
class Section:
    loss: Named
    others: tuple[Named, ...] = ()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A package outside of the tree with one member."""
    (tmp_path / "outside_pkg.py").write_text(
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Own:\n    knob: int\n"
        "    def __call__(self, x):\n        return self.knob + x\n"
    )
    (tmp_path / "outside_broken.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("outside_pkg", "outside_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("plain", 3.0),
        ("scaled", 6.0),
        # as the command line gives it
        ("{'name': 'scaled', 'factor': 4.0}", 12.0),
        ({"name": "scaled", "factor": 5}, 15.0),
        ("tests.rl_code.config.test_named:plain", 3.0),
        ({"name": "outside_pkg:Own", "knob": 7}, 10.0),
    ],
)
def test_a_name_gives_the_member_with_its_settings(outside, value, wanted):
    section = read_config.build(Section, {"loss": value, "others": [value]})
    assert make(FAMILY, section.loss, "config.loss")(3.0) == wanted
    again = read_config.build(Section, read_config.to_dict(section))
    assert again == section


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("scald", r"config.loss = 'scald': expected one of 'plain', 'scaled'.*mean 'scaled'"),
        ("nowhere.at_all:x", "config.loss = .* no module 'nowhere'"),
        ("outside_pkg:Nothing", "outside_pkg has no 'Nothing'"),
        ({"name": "scaled", "facto": 1.0}, "config.loss.facto: no such key.*'factor'"),
        ({"name": "scaled", "factor": "x"}, "config.loss.factor = 'x': expected float"),
        ({"name": "outside_pkg:Own"}, "config.loss.knob: missing"),
        ({"name": "plain", "x": 1}, "plain takes no settings, found x"),
        (3, "config.loss = 3: expected a name"),
        ({"factor": 2.0}, "expected a name"),
        ("{'factor': 2.0}", "expected a name"),
        ("{'name': 'scaled'", "expected a name, or package.module:object|expected one of"),
        ("{" * 5000, "expected one of"),
    ],
)
def test_a_wrong_name_is_refused_and_named(outside, value, message):
    with pytest.raises(ConfigError, match=message):
        make(FAMILY, read_config.build(Section, {"loss": value}).loss, "config.loss")


def test_an_import_that_fails_inside_the_users_module_keeps_its_traceback(outside):
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        find(FAMILY, "outside_broken:x", "config.loss")


@pytest.mark.parametrize(
    ("family", "kind"),
    [(SOURCES, Source), (TOOLS, Tool), (HARNESSES, Agent)],
    ids=["sources", "tools", "agents"],
)
def test_members_that_are_imported_when_asked_for_are_there(family, kind):
    assert all(issubclass(find(family, name, ""), kind) for name in family)
