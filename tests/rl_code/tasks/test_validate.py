"""Verdicts on tasks: each way in which a task does not work has its reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.layers import installed
from rl_code.redteam import ground as weak
from rl_code.redteam.ground import BARE, PLAIN
from rl_code.tasks import validate
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Refusal, Source
from rl_code.tasks.validate import Verdict, judge, judge_all
from rl_code.types import Case, Layer, Limits, Task, Tests, World
from tests import programs
from tests.rl_code.tasks import projects
from tests.rl_code.tasks.projects import FAILING, PASSING

ROOT = Path(__file__).resolve().parents[3]
LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=120.0)


def task(
    id="double", start="def f(x):\n    return x\n", end="def f(x):\n    return 2 * x\n", **more
):
    fields = dict(
        id=id,
        messages=(),
        files={"solution.py": start},
        path="solution.py",
        entry_point="f",
        visible_tests=Tests(),
        hidden_tests=Tests(cases=(Case((2,), 4), Case((0,), 0))),
        reference={"solution.py": end},
    )
    return Task(**{**fields, **more})


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories") / "lab" / "shop"
    return {"folder": str(folder.parents[1]), **projects.make_shop(folder)}


@pytest.mark.parametrize(
    ("wrong", "reason", "detail"),
    [
        (task(), "", ""),
        (task(start=task().reference["solution.py"]), validate.PASSES_BEFORE, "all tests"),
        (task(end="def f(x):\n    return 3 * x\n"), validate.REFERENCE_FAILS, "case 1"),
        (task(hidden_tests=Tests()), validate.NO_TESTS, ""),
        (task(reference={}), validate.NO_REFERENCE, ""),
    ],
    ids=["works", "solved already", "wrong reference", "no tests", "no reference"],
)
def test_function_tasks(layered_pool, wrong, reason, detail):
    verdict = judge(wrong, layered_pool, LIMITS, runs=2)
    assert verdict.reason == reason
    # behind the names of tests that fail stands why the first one does
    names, _, why = verdict.detail.partition(": ")
    assert names == detail and bool(why) == (reason == validate.REFERENCE_FAILS)


def test_what_differs_from_run_to_run_is_told(layered_pool, monkeypatch):
    grade = validate.grade_in_words
    seen = []

    def unsteady(*args):
        seen.append(1)
        found = grade(*args)
        if len(seen) == 2:  # the second run before the work
            return dataclasses.replace(found[0], hidden=(True, True)), found[1]
        return found

    monkeypatch.setattr(validate, "grade_in_words", unsteady)
    verdict = judge(task(), layered_pool, LIMITS, runs=3)
    assert (verdict.reason, verdict.detail) == (validate.DIFFERS, "case 1")


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({}, "", ""),
        (
            dict(FAIL_TO_PASS=[FAILING, PASSING], PASS_TO_PASS=[]),
            validate.PASSES_BEFORE,
            PASSING,
        ),
        (
            dict(PASS_TO_PASS=[f"{PASSING}[1]"]),
            validate.BROKEN_BEFORE,
            f"{PASSING}[1]: the test was not run",
        ),
        (
            dict(FAIL_TO_PASS=[f"{FAILING}_2"]),
            validate.REFERENCE_FAILS,
            f"{FAILING}_2: the test was not run",
        ),
    ],
    ids=["works", "passes before", "never passed", "no such test"],
)
def test_repository_tasks(layered_pool, shop, packages, tmp_path, change, reason, detail):
    path = projects.write_rows(tmp_path / "tasks.jsonl", projects.swe_row(shop, **change))
    places = {"repositories": shop["folder"], "packages": packages}
    (found,) = find_source(Named("swe", {"path": str(path), "places": places}), "tasks").load(
        layered_pool, None
    )
    verdict = judge(found, layered_pool, LIMITS, runs=1)
    assert (verdict.reason, verdict.detail) == (reason, detail)


@pytest.mark.parametrize(("ground", "count"), [(PLAIN, 2), (BARE, 1), ("suite", 0)])
def test_tasks_that_can_be_forged_are_told_and_left_out_where_asked(
    layered_pool, store, ground, count
):
    world = World((Layer(installed.build(store), "/opt/packages"),))
    verdict = judge(weak.task(ground, world), layered_pool, LIMITS, runs=1)
    assert verdict.reason == "" and verdict.forgeable.count("::") == count
    assert (verdict.guarded == 0) == (count > 0) and verdict.required >= verdict.guarded
    assert f"{verdict.guarded} of the {verdict.required} hidden tests" in str(
        validate.table("mine", [verdict]).caption
    )
    told = " can be forged" in str(validate.table("mine", [verdict]).caption)
    assert told == (count > 0)
    refused = validate.refusing(verdict, forgeable=True)
    assert refused.reason == (validate.FORGEABLE if count else "")
    assert validate.refusing(refused, forgeable=False) == verdict


def test_a_world_without_pytest_is_told(layered_pool, shop, tmp_path):
    path = projects.write_rows(tmp_path / "tasks.jsonl", projects.swe_row(shop))
    settings = {"path": str(path), "places": {"repositories": shop["folder"]}}
    (found,) = find_source(Named("swe", settings), "tasks").load(layered_pool, None)
    verdict = judge(found, layered_pool, LIMITS, runs=1)
    assert verdict.reason == validate.NOT_GRADED and "needs a layer of packages" in verdict.detail


def test_verdicts_on_the_same_tasks_stand_and_others_are_made_again(layered_pool, tmp_path):
    def run(tasks, known):
        found = []
        judge_all(tasks, layered_pool, LIMITS, 1, 2, known, found.append)
        return {verdict.id: verdict for verdict in found}

    tasks = [
        ("double", task()),
        ("none", Refusal("there is no such image")),
        ("same", task("same")),
    ]
    first = run(tasks, {})
    assert [first[id].reason for id, _ in tasks] == ["", validate.NOT_BUILT, ""]
    path = tmp_path / "verdicts.json"
    validate.save(path, "mine", list(first.values()), finished=True)
    assert validate.load(path) == first and json.loads(path.read_text())["works"]
    # of what is known, a verdict on the same task is taken as it is
    forged = {**first, "same": dataclasses.replace(first["same"], reason="known")}
    changed = [("double", task(end="def f(x):\n    return x + x\n")), tasks[2]]
    second = run(changed, forged)
    assert second["same"].reason == "known"
    assert second["double"].digest != first["double"].digest
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"verdicts\.json holds no verdicts on tasks"):
        validate.load(path)


def test_the_table_groups_by_reason():
    verdicts = [Verdict("a", ""), *(Verdict(f"b{i}", "fails", "why[x]") for i in range(7))]
    view = validate.table("mine", verdicts)
    columns = [list(column.cells) for column in view.columns]
    assert columns[:3] == [["1", "7"], ["12.5 %", "87.5 %"], ["work", "fails"]]
    words = str(columns[3][1])
    assert words.startswith("b0: why[x]\n") and words.endswith("and 2 more")


def test_a_stop_keeps_what_was_done(layered_pool, tmp_path, monkeypatch):
    """Ctrl-C in the middle: what is judged is kept, and what has begun ends."""
    from launch import validate as command

    if not command.flags.FLAGS.is_parsed():
        command.flags.FLAGS(["validate"])

    class Interrupted(Source):
        def load_each(self, pool, workdir):
            yield "none", Refusal("there is no such image")
            yield "double", task()
            raise KeyboardInterrupt

        load = count = None

    monkeypatch.setattr(
        command, "tasks_of", lambda sources, pool: (3, sources["tasks"].load_each(pool, None))
    )
    verdicts, finished = command.run({"tasks": Interrupted()}, layered_pool, {}, None, "mine")
    ids = [verdict.id for verdict in verdicts]
    assert not finished and ids in (["none"], ["none", "double"])  # it may not have begun


def test_a_task_that_nobody_foresaw_has_a_verdict(layered_pool):
    odd = [
        task("half", messages=({"role": "user", "content": "\ud83d"},)),
        task("text", start="\ud83d"),
        task("path", reference={"a\0b": ""}),
        task("case", hidden_tests=Tests(cases=(Case((object(),), 4),))),
        task("good"),
    ]
    found = []
    tasks = [(one.id, one) for one in odd]
    judge_all(tasks, layered_pool, LIMITS, 1, 1, {}, found.append)
    assert [one.id for one in found] == [one.id for one in odd]
    reasons = {one.id: one.reason for one in found}
    assert reasons["path"] and reasons["case"] and reasons["good"] == ""


def test_verdicts_before_a_crash_are_kept(layered_pool, tmp_path, monkeypatch):
    from launch import validate as command

    if not command.flags.FLAGS.is_parsed():
        command.flags.FLAGS(["validate"])

    def broken(sources, pool):
        yield "none", Refusal("there is no such image")
        yield "double", task()
        raise MemoryError

    monkeypatch.setattr(command, "tasks_of", lambda *given: (3, broken(*given)))
    path = tmp_path / "verdicts.json"
    with pytest.raises(MemoryError):
        command.run({}, layered_pool, {}, path, "mine")
    assert "none" in validate.load(path) and not json.loads(path.read_text())["finished"]


def test_the_sources_of_a_config_are_those_of_its_tasks_and_suites(tmp_path):
    from launch import validate as command

    if not command.flags.FLAGS.is_parsed():
        command.flags.FLAGS(["validate"])
    found = command.read_sources(f"{ROOT}/configs/repositories.py:smoke")
    assert found["tasks"].name == "repositories" and len(found) > 1
    assert command.read_sources("humaneval") == {"tasks": Named("humaneval", {})}
    with pytest.raises(ConfigError, match="no such config file"):
        command.read_sources("configs/none.py")
    (tmp_path / "wrong.py").write_text("def get_config():\n    return int.nothing\n")
    with pytest.raises(ConfigError, match=r"wrong\.py, line 2: AttributeError: type object 'int'"):
        command.read_sources(f"{tmp_path}/wrong.py")


def test_a_file_or_folder_of_tasks_is_told_that_a_config_says_how_it_is_read(tmp_path):
    from launch import validate as command

    (tmp_path / "tasks.jsonl").touch()
    for place in (tmp_path / "tasks.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=f"^{place} does not say how .*validate records --s"):
            command.read_sources(str(place))


def test_the_command_validates_a_file(tmp_path):
    rows = [
        {"id": id, "text": "double", "name": "f", "tests": "assert f(2) == 4", "solution": solution}
        for id, solution in (("good", "def f(x): return 2 * x"), ("bad", "def f(x): return x"))
    ]
    path = projects.write_rows(tmp_path / "mine.jsonl", *rows)
    columns = dict(
        id="id", messages="text", entry_point="name", tests="tests", reference="solution"
    )
    kept = tmp_path / "verdicts.json"
    settings = f"--settings={json.dumps({'path': str(path), 'columns': columns})}"
    line = ["records", "--judgings=1", f"--verdicts={kept}", settings]
    done = programs.run("launch.validate", *line)
    assert done.returncode == 0, done.stderr
    assert "50.0 %" in done.stdout and validate.REFERENCE_FAILS in done.stdout
    written = json.loads(kept.read_text())
    assert written["works"] == ["good"] and written["finished"]


def test_settings_beside_a_config_are_refused():
    from launch import validate as command

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    given = flagsaver.as_parsed(settings="{}")
    with given, pytest.raises(ConfigError, match=r"own_model\.py has settings of its own"):
        command.read_sources("configs/own_model.py")
