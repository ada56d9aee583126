"""Moments at which a programmer goes to another place, their pages and demonstrations."""

from __future__ import annotations

import random

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.tools.suggest import around
from rl_code.tasks import jump_page, jumps
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.jump_changes import HELD_OUT, NEEDLESS, TRAINED, Draw
from rl_code.tasks.jump_page import Edit, Place
from rl_code.types import Limits

TASKS = [jumps.generate(split, 0, i) for split in ("train", "test") for i in range(200)]
LIMITS = Limits(turns=1, tokens=192, turn_tokens=10, test_runs=0, command_s=5.0)


def line(task, place: str) -> str:
    """The text of a line of a task's repository."""
    path, _, number = place.partition(":")
    return task.meta["repository"][path].splitlines()[int(number) - 1]


def test_the_page_shows_every_place_among_others():
    for task in TASKS:
        page, behind = around(task)
        assert page == task.files[jumps.PAGE] and behind == ""
        for text in task.meta["repository"].values():
            compile(text, task.id, "exec")
        shown = page.partition("\nopen\n")[2].splitlines()
        assert [one.partition(" ")[0] for one in shown] == task.meta["outline"], task.id
        assert set(task.meta["remaining"]) <= set(task.meta["outline"]), task.id
        for place in task.meta["remaining"]:
            assert jumps.place_of(task, place) == Place(*_parts(place))


def _parts(place: str) -> tuple[str, int]:
    path, _, number = place.rpartition(":")
    return path, int(number)


def test_a_plain_search_for_the_name_does_not_find_the_places():
    """Most pages show lines that look like those that have to be edited, and need nothing."""
    needed = [task for task in TASKS if task.meta["remaining"]]
    more = [task for task in needed if len(task.meta["outline"]) > len(task.meta["remaining"])]
    assert len(more) > 0.9 * len(needed)
    alike = 0
    for task in needed:
        texts = {line(task, one).strip() for one in task.meta["remaining"]}
        others = set(task.meta["outline"]) - set(task.meta["remaining"])
        alike += any(line(task, one).strip() in texts for one in others)
    assert alike > 0.2 * len(needed)


def test_kinds_of_tests_are_in_no_other_split():
    kinds = {s: {t.meta["kind"] for t in TASKS if t.meta["split"] == s} for s in ("train", "test")}
    assert kinds == {"train": set(TRAINED), "test": set(HELD_OUT)}
    assert set(jumps.kinds_of("validation")) == set(TRAINED)
    assert not set(TRAINED) & set(HELD_OUT)


@pytest.mark.parametrize("kind", [*TRAINED, *HELD_OUT])
def test_a_use_changes_exactly_where_the_kind_needs_it(kind):
    change = {**TRAINED, **HELD_OUT}[kind](Draw.of(random.Random(0), "store", "views"))
    forms = [*change.uses, *([change.imported] if change.imported else [])]
    assert any(form.after is not None for form in forms) == (kind not in NEEDLESS)
    assert all(form.after != form.before for form in forms)
    assert change.before != change.after


def test_places_come_in_the_order_of_the_person_and_done_ones_are_gone():
    seen = set()
    for task in TASKS:
        if task.meta["done"]:
            assert task.files[jumps.PAGE].count("edit ") > 1
        places = [_parts(place) for place in task.meta["remaining"]]
        files = list(task.meta["repository"])
        if task.meta["order"] == "imports_first":
            tops = [number > 1 for _, number in places]
            assert tops == sorted(tops)
        elif task.meta["order"] == "last_first":
            order = [-files.index(path) for path, _ in places]
            assert order == sorted(order)
        seen.add((task.meta["order"], bool(task.meta["done"])))
    assert len(seen) == 2 * len(jumps.ORDERS)
    none = sum(not task.meta["remaining"] for task in TASKS) / len(TASKS)
    assert 0.2 < none < 0.6


def test_the_same_arguments_give_the_same_task():
    assert jumps.generate("train", 0, 7) == TASKS[7]
    assert jumps.generate("train", 1, 7) != TASKS[7]
    source = find_source(Named("jumps", {"split": "train"}), "config.tasks")
    assert source.load(None, None)[7] == TASKS[7]
    with pytest.raises(ConfigError, match="split='all' is not one of"):
        find_source(Named("jumps", {"split": "all"}), "config.tasks")


def test_demonstrations_are_right_as_often_as_they_say():
    rng = random.Random(0)
    told = [(t, jumps.demonstrate(t, rng, 0.65)) for t in TASKS for _ in range(10)]
    there = [(t, one) for t, one in told if t.meta["remaining"]]
    right = sum(one in t.meta["remaining"] for t, one in there) / len(there)
    assert 0.65 * (1 - jumps.P_NOTHING) - 0.03 < right < 0.85
    assert all(one == "" or jumps.place_of(t, one) for t, one in told)
    prompt, message = demonstrate(TASKS[0], random.Random(1), DemonstrationConfig(), LIMITS)
    assert prompt.text == Infill().prompt(TASKS[0], {}) and message.text.endswith("<|eot|>")


def test_an_edit_is_the_lines_that_differ():
    edit = jump_page.edit_between("a.py", "a\nb\nc\n", "a\nx\ny\nc\n")
    assert edit == Edit("a.py", 2, ("b",), ("x", "y"))
    assert jump_page.edit_between("a.py", "a\n", "a\n") is None
    assert jump_page.edit_between("a.py", "a\na\n", "a\n") == Edit("a.py", 2, ("a",), ())
    # the end of the last line is no line
    assert jump_page.edit_between("a.py", "a", "a\n") is None


def test_a_page_is_bounded():
    text = "\n".join(["x = load(" + "a" * 500 + ")"] * 500)
    edit = Edit("a.py", 1, tuple(["def load():"] * 50), ("def save():",))
    page = jump_page.write([edit] * 9, {"a.py": text})
    assert len(page.splitlines()) < 80 and max(map(len, page.splitlines())) < 100
    short = jump_page.write([edit], {"a.py": text}, 600)
    assert 500 < len(short) <= 600 and page.count("\nopen\na.py:2 x = load") == 1


@pytest.mark.parametrize("answer", ["", "a.py", "a.py:0", "a.py:3", "b.py:1", "a.py:x", "a.py:1:1"])
def test_an_answer_that_names_no_line_is_none(answer):
    assert jump_page.read(answer, {"a.py": "x\ny\n"}) is None


def test_an_answer_names_a_line():
    assert jump_page.read(" a.py:2\n", {"a.py": "x\ny\n"}) == Place("a.py", 2)
