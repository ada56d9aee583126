"""Results count what happened, survive the disk, and are compared only on the same tasks."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import rich.console
import scipy

from launch.train import show_difference
from rl_code import types
from rl_code.evaluation import compare, suite
from rl_code.evaluation.suite import SuiteResult, TaskResult
from rl_code.report.evaluations import suites
from rl_code.types import Context, Group, Reward, Task, Trajectory


def _result(
    correct: dict[str, int], n: int = 4, label: str = "before", first: int = 0
) -> SuiteResult:
    tasks = tuple(TaskResult(id, n, c, min(c, first), 1, 20.0) for id, c in correct.items())
    return SuiteResult("generated", label, 0, {"temperature": 1.0}, tasks)


def _group(id: str, *outcomes: str, edits: bool = True) -> Group:
    none = types.Tests()
    task = Task(id, (), {}, "a.py", "f", none, none, {})
    samples = []
    for index, outcome in enumerate(outcomes):
        components = (
            {} if outcome == "fault" else {"tests": float(outcome == "solved"), "partial": 0.1}
        )
        sampled = np.arange(10) >= 6 - index
        samples.append(
            Trajectory(
                task_id=id,
                group=0,
                index=index,
                contexts=(
                    Context(
                        tokens=np.zeros(10, np.int32),
                        sampled=sampled,
                        logprobs=np.zeros(10, np.float32),
                        versions=np.zeros(10, np.int32),
                    ),
                ),
                prompt_length=2,
                turns=(),
                status="fault" if outcome == "fault" else "submitted",
                reward=Reward(0.0, components),
                solved=outcome == "solved",
                malformed_calls=index,
                first_edit_passed=outcome == "solved" and index == 0 if edits else None,
            )
        )
    return Group(task, tuple(samples))


def _text(table, width: int = 160) -> str:
    file = io.StringIO()
    rich.console.Console(file=file, width=width).print(table)
    return file.getvalue()


def test_episodes_are_counted_by_task_and_a_fault_is_a_failure():
    groups = [
        _group("a", "solved", "failed"),
        _group("b", "failed", "fault"),
        _group("a", "solved"),
    ]
    result = suite.from_groups("s", "before", 3, {"temperature": 0.0}, groups)
    costs = dict(calls=0, mean_seconds=0.0, cheats=0)
    assert result.tasks == (
        TaskResult(
            "a",
            n=3,
            correct=2,
            first_edit_correct=2,
            malformed=1,
            mean_tokens=(4 + 5 + 4) / 3,
            **costs,
        ),
        TaskResult(
            "b",
            n=2,
            correct=0,
            first_edit_correct=0,
            malformed=1,
            mean_tokens=4.5,
            faults=1,
            **costs,
        ),
    )
    assert result.per_episode("malformed") == 2 / 5 and result.per_episode("tokens") == 22 / 5


def test_losing_the_samples_that_fail_raises_no_pass_rate():
    honest = suite.from_groups("s", "x", 0, {}, [_group("a", "solved", *["failed"] * 3)])
    sabotaged = suite.from_groups("s", "x", 0, {}, [_group("a", "solved", *["fault"] * 3)])
    assert honest.interval(1).mean == sabotaged.interval(1).mean == 0.25


def test_partial_credit_does_not_count_as_solved():
    result = suite.from_groups("s", "x", 0, {}, [_group("a", "failed", "failed")])
    assert result.interval(1).mean == 0


def test_results_come_back_from_the_disk(tmp_path):
    after = dataclasses.replace(_result({"a": 4, "b": 1}, label="after"), step=12)
    before = _result({"a": 1, "b": 0})
    path = after.save(tmp_path)
    before.save(tmp_path)
    assert suite.load(path) == after
    assert suite.load_all(tmp_path) == [before, after]


@pytest.mark.parametrize("text", ["{", "[]", '{"suite": "s"}', '{"tasks": [{"id": "a", "n": 1}]}'])
def test_a_file_that_is_no_result_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        suite.load(tmp_path / "x.json")


def test_impossible_results_are_refused():
    with pytest.raises(ValueError, match=r"task a.*5"):
        _result({"a": 5})
    one = TaskResult("a", 1, 1, 0, 0, 1.0)
    with pytest.raises(ValueError, match="repeated: a"):
        SuiteResult("s", "x", 0, {}, (one, one))


def test_too_few_samples_are_named_and_shown_as_a_dash():
    result = SuiteResult(
        "s", "x", 0, {}, (TaskResult("a", 8, 1, 1, 0, 1.0), TaskResult("b", 7, 1, 1, 0, 1.0))
    )
    with pytest.raises(ValueError, match=r"pass@8.*b \(7\)"):
        result.pass_at(8)
    (row,) = [line for line in _text(suite.table([result], [1, 8])).splitlines() if " s " in line]
    assert [cell.strip() for cell in row.split("│")][5] == "-"


def test_what_episodes_cost_and_who_cheated_is_counted():
    (group,) = [_group("a", "solved", "failed")]
    call = types.ToolCall("submit", {})
    turns = (types.Turn("assistant", 0, 1, "", calls=(call, call, types.ToolCall("", {}, "no"))),)
    first, second = group.trajectories
    first = dataclasses.replace(first, turns=turns, seconds={"tools": 1.0, "grade": 2.0})
    forged = Reward(-1.0, {}, ("forged_result", "timeout"))
    second = dataclasses.replace(second, reward=forged)
    result = suite.from_groups("s", "x", 0, {}, [Group(group.task, (first, second))])
    means = {field: result.per_episode(field) for field in ("calls", "seconds", "cheats")}
    assert means == {"calls": 1.0, "seconds": 1.5, "cheats": 0.5}
    (row,) = [line for line in _text(suite.costs([result])).splitlines() if " s " in line]
    assert [cell.strip() for cell in row.split("│")][-6:-1] == ["4", "1.0", "0.50", "1.50", "50.0%"]
    # a file from before these were counted says nothing of them
    assert _result({"a": 1}).per_episode("cheats") is None
    assert suite.costs([_result({"a": 1})]).columns[-1]._cells == ["-"]


def test_a_curve_has_a_row_for_each_doubling():
    few, many = _result({"a": 1, "b": 0}, n=2), _result({"a": 6, "b": 0}, n=6, label="after")
    assert suite.doublings(6) == [1, 2, 4, 6] and suite.doublings(1) == [1]
    rows = [line.split("│")[1:-1] for line in _text(suite.curve([few, many])).splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    assert [row[0] for row in cells] == ["1", "2", "4", "6"]
    assert [row[1][:4] for row in cells] == ["25.0", "50.0", "-", "-"]
    assert [row[2][:4] for row in cells] == ["50.0"] * 4


def test_tables_show_the_numbers_of_the_result():
    before = _result({"a": 1, "b": 0})
    after = _result({"a": 4, "b": 2}, label="after", first=1)
    text = _text(suite.table([before, after], [1, 4]))
    assert (
        "12.5 [0.0, 25.0]" in text and "75.0 [50.0, 100.0]" in text and "25.0 [25.0, 25.0]" in text
    )
    narrow = _text(suite.tables([before, after], [1, 4]), width=100)
    assert "25.0 [25.0, 25.0]" in narrow and "cheats" in narrow and "…" not in narrow
    assert "+62.5 [+50.0, +75.0]" in _text(compare.table([compare.compare(before, after, 1)]))


def test_comparison_pairs_by_id_and_not_by_order():
    before = _result({"a": 0, "b": 4, "c": 2})
    after = _result({"c": 2, "b": 4, "a": 1}, label="after")
    found = compare.compare(before, after, 1)
    assert (found.gained, found.lost) == (1, 0)
    assert found.difference.mean == pytest.approx(1 / 12)
    assert found == compare.compare(before, dataclasses.replace(after, tasks=after.tasks[::-1]), 1)


def test_pairing_narrows_the_interval_of_what_both_share():
    generator = np.random.default_rng(0)
    base = {str(i): int(c) for i, c in enumerate(generator.integers(0, 8, 100))}
    before = _result(base, n=8)
    after = _result({id: c + 1 for id, c in base.items()}, n=8, label="after")
    found = compare.compare(before, after, 1)
    assert found.difference.low == pytest.approx(found.difference.high) == pytest.approx(1 / 8)
    assert found.before.high - found.before.low > 0.05


def test_different_tasks_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"generated\.before has c; only generated\.after has x, y"
    ):
        compare.compare(
            _result({"a": 1, "c": 1}), _result({"a": 1, "x": 1, "y": 0}, label="after"), 1
        )


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 5), (3, 9), (12, 2), (40, 61)])
def test_mcnemar_equals_the_binomial_test(gained, lost):
    expected = scipy.stats.binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert compare.mcnemar(gained, lost) == pytest.approx(expected, rel=1e-12)
    assert compare.mcnemar(gained, lost) == compare.mcnemar(lost, gained)


def test_mcnemar_is_given_only_for_one_sample_per_task():
    greedy = compare.compare(
        _result({"a": 0, "b": 1}, n=1), _result({"a": 1, "b": 1}, n=1, label="after"), 1
    )
    assert greedy.p_value == 1.0 and greedy.gained == 1
    assert compare.compare(_result({"a": 0}), _result({"a": 1}, label="after"), 1).p_value is None


def test_first_edit_is_paired_with_its_own_episode():
    result = _result({"a": 4, "b": 4, "c": 0}, first=2)
    gain = compare.whole_against_first_edit(result)
    assert gain.mean == pytest.approx(1 / 3) and gain.low >= 0


@pytest.mark.parametrize("edits", [True, False])
def test_the_first_edit_of_an_agent_without_a_tool_that_edits_is_not_known(tmp_path, edits):
    none, all_right = (
        suite.from_groups("s", label, 0, {}, [_group("a", outcome, edits=edits)])
        for label, outcome in (("before", "failed"), ("after", "solved"))
    )
    assert suite.load(all_right.save(tmp_path)) == all_right
    cells = _text(suite.table([all_right], [1])).split("│")
    file = io.StringIO()
    show_difference(rich.console.Console(file=file, width=160), [none, all_right])
    assert ("first edit alone" in file.getvalue()) == edits
    assert cells[5].strip() == ("100.0 [100.0, 100.0]" if edits else "-")
    (_, row) = suites({"run": [none, all_right]}, [1])[0]["rows"]
    assert (row["first_edit"] is not None) == edits == (row["gain"] != "")
    if not edits:
        with pytest.raises(ValueError, match="suite 's': first edits are not known of an agent"):
            all_right.interval(1, first_edit=True)
