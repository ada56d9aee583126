"""Adapters of two organisations: whose files are whose, and what proves that they were kept apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from experiments.organisations import isolation, report
from experiments.organisations.holes import AskedAtHome, Holes, of
from rl_code.environment.tools.suggest import around
from rl_code.types import Group
from tests.experiments.test_tab import episode

BOTH = ("brief", "thorough")


def tasks(*organisations: str, count: int = 24) -> list:
    stream = Holes(organisations, silent=0.4).load(None, None)
    return list(itertools.islice(stream, count))


def test_organisations_take_turns_and_share_no_file():
    found = tasks(*BOTH)
    assert [of(task) for task in found[:4]] == ["brief", "thorough"] * 2
    # the same files as in a stream of its own
    assert found[::2] == tasks("brief", count=12)
    texts = [{task.files[task.path] + task.id.partition("/")[2] for task in found[at::2]}
             for at in (0, 1)]  # fmt: skip
    assert not texts[0] & texts[1]
    assert not any(name in around(task)[0] for task in found for name in BOTH)


def test_organisations_want_different_suggestions():
    asked = AskedAtHome()

    def earned(name: str, least: int, most: int) -> float:
        wanted = [(task, task.meta["wanted"]) for task in tasks(name, count=120)]
        fitting = [asked.expected(*each) for each in wanted if least <= len(each[1]) <= most]
        return float(np.mean(fitting))

    assert earned("brief", 1, 8) > earned("thorough", 1, 8) + 0.2
    assert earned("thorough", 24, 99) > earned("brief", 24, 99) + 0.2
    assert asked.expected(tasks("brief", count=1)[0], " ") == 0.0


@pytest.mark.parametrize("wrong", [(), ("nobody",)])
def test_wrong_organisations_are_named(wrong):
    with pytest.raises(ValueError, match="must be some of recorded"):
        Holes(wrong)


def checked(monkeypatch, seen, bases):
    monkeypatch.setattr(isolation, "training_set", seen.__getitem__)
    monkeypatch.setattr(isolation, "base_of", bases.__getitem__)
    isolation.check({name: name for name in seen})


def test_data_of_another_organisation_are_found(monkeypatch):
    apart = {"brief": {"a": "brief"}, "thorough": {"b": "thorough"}}
    apart["shared"] = {"a": "brief", "b": "thorough"}
    base = {name: {"w": np.ones(2)} for name in apart}
    checked(monkeypatch, apart, base)
    with pytest.raises(isolation.Mixed, match="brief was trained on tasks of thorough"):
        checked(monkeypatch, apart | {"brief": apart["shared"]}, base)
    with pytest.raises(isolation.Mixed, match="both trained on a"):
        checked(monkeypatch, apart | {"thorough": {"a": "thorough"}}, base)
    with pytest.raises(isolation.Mixed, match="base model of shared differs in w"):
        checked(monkeypatch, apart, base | {"shared": {"w": np.zeros(2)}})


def test_the_table_compares_home_with_shared():
    found = tasks(*BOTH, count=8)

    def group(task, text: str) -> Group:
        return Group(task, (episode(text, task=task), episode(text, 1, task)))

    names = (*BOTH, "shared")
    groups = [
        group(task, task.meta["wanted"] if name == of(task) else "")
        for name in names
        for task in found
    ]
    one = report.earned(groups, names)
    assert one.organisations == BOTH * 4
    assert (one.reward[2] == 0).all() and (one.shown[2] == 0).all()
    home = one.reward[0, ::2].mean()
    view = report.rewards([one], BOTH)
    assert next(iter(view.columns[-1].cells)).startswith(f"{home:+.3f}")


def test_the_figure_has_the_numbers_of_the_table(tmp_path, monkeypatch):
    """On made-up results: each adapter earns at home, the shared one half of it."""
    from matplotlib.axes import Axes  # slow to import

    rng = np.random.default_rng(0)
    whose = BOTH * 30
    means = np.array([[0.3, -0.2], [-0.1, 0.2], [0.15, 0.1]])  # [adapters, organisations]
    at = np.array([BOTH.index(one) for one in whose])
    found = [
        report.Earned((*BOTH, "shared"), whose, means[:, at] + noise, np.ones((3, 60)))
        for noise in rng.normal(0, 0.1, (3, 3, 60))
    ]
    drawn = []
    draw = Axes.errorbar

    def errorbar(axis, x, y, errors, **how):
        drawn.append((y, errors))
        return draw(axis, x, y, errors, **how)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    report.draw(found, BOTH, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1_000
    said = [list(column.cells) for column in report.rewards(found, BOTH).columns[1:]]
    for cells, (values, errors) in zip(said, drawn, strict=True):
        for cell, value, (below, above) in zip(cells, values, errors.T, strict=True):
            assert cell.startswith(f"{value:+.3f} [{value - below:+.3f}, {value + above:+.3f}]")
