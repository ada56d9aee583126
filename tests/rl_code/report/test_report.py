"""The page holds what the run left, stays within its size, and nothing a model wrote becomes part
of its markup.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from launch import report
from rl_code import types
from rl_code.evaluation.suite import SuiteResult, TaskResult
from rl_code.metrics.writers import MetricLog
from rl_code.report import edits
from rl_code.report.curves import curves
from rl_code.report.edits import with_diffs
from rl_code.report.page import ReportConfig, write_report
from rl_code.report.trajectories import choose, spread
from rl_code.run import provenance, trajectory_log
from rl_code.run.trajectory_log import Words, trajectory_steps, write_evaluation
from rl_code.run.workdir import CONFIG_FILE, STORE
from rl_code.store.compaction import Compaction
from rl_code.store.store import GroupStore
from rl_code.types import Context, Group, Reward, Task, ToolCall, ToolResult, Trajectory, Turn
from tests.rl_code.trajectories import record_step

CONFIG = ReportConfig(ks=(1, 2), trajectories_per_step=4, trajectory_steps=5, megabytes=1.0)
HOSTILE = "</script><script>alert(1)</script><!--<script>&amp;\u2028\udc80"


TEXT_OF: dict = {}  # workdir -> what its tokenizer gives for a token, before the id


@pytest.fixture(autouse=True)
def _words(monkeypatch):
    """Another tokenizer for each workdir; nobody cuts the power."""

    def words_of(workdir):
        return Words(lambda ids: "".join(f"{TEXT_OF[workdir]}{id}" for id in ids))

    monkeypatch.setattr(trajectory_log, "words_of", words_of)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class _Page(HTMLParser):
    """Counts elements, keeps their attributes and the content of the data element."""

    def __init__(self, text: str):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.data = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = ("id", "data") in attrs

    def handle_data(self, data):
        if self._inside:
            self.data += data

    def handle_endtag(self, tag):
        self._inside = False


def _trajectory(
    group: int, index: int, solved: bool, flags: tuple[str, ...] = (), text: str = HOSTILE
) -> Trajectory:
    tokens = np.arange(6, dtype=np.int32)
    return Trajectory(
        task_id=f"task {group} {text}",
        group=group,
        index=index,
        contexts=(
            Context(
                tokens=tokens,
                sampled=tokens >= 2,
                logprobs=np.where(tokens >= 2, -0.123 * tokens, 0).astype(np.float32),
                versions=np.array([-1, -1, 3, 3, 4, 4], np.int32),
            ),
        ),
        prompt_length=2,
        turns=(
            Turn("prompt", 0, 2, text),
            Turn("assistant", 2, 6, text, calls=(ToolCall(text, {"content": text}, text),)),
            Turn("tool", 6, 6, "", results=(ToolResult(text, text, False),)),
        ),
        status="submitted",
        reward=Reward(float(solved), {"tests": float(solved)}, flags),
        solved=solved,
    )


def _group(
    group: int, solved: list[bool], flags: tuple[str, ...] = (), text: str = HOSTILE
) -> Group:
    none = types.Tests()
    task = Task(
        f"task {group} {text}",
        (),
        {},
        "a.py",
        "f",
        none,
        none,
        {"a.py": text},
        meta={"level": text},
    )
    return Group(task, tuple(_trajectory(group, i, s, flags, text) for i, s in enumerate(solved)))


def _write_run(workdir, steps: int = 3, text: str = HOSTILE) -> None:
    TEXT_OF[workdir] = text
    with MetricLog(workdir) as writer:
        for step in range(steps):
            writer.write(
                step,
                {
                    "reward/total": step / 10,
                    "policy/kl": float("nan"),
                    "time/step_s": 2,
                    "time/a_s": 1,
                },
            )
            solved = ([True, False], [False, False])
            record_step(workdir, step, [_group(n, s, text=text) for n, s in enumerate(solved)])
    for label, step, correct in (("before", 0, 1), ("after", steps, 2)):
        tasks = tuple(TaskResult(f"{i}", 2, correct, 1, 0, 5.0) for i in range(4))
        SuiteResult("held-out", label, step, {"temperature": 1.0}, tasks).save(workdir)


def _read(path) -> tuple[str, _Page, dict]:
    text = path.read_text()
    page = _Page(text)
    return text, page, json.loads(page.data)


def test_the_page_shows_what_the_run_left(tmp_path):
    _write_run(tmp_path)
    text, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    assert data["curves"]["series"]["reward/total"] == [0.0, 0.1, 0.2]
    assert data["curves"]["series"]["policy/kl"] == [None] * 3
    (stack,) = data["curves"]["times"]
    assert [layer["values"] for layer in stack["layers"]] == [[1] * 3, [1] * 3]
    assert [step["step"] for step in data["trajectories"]["sources"]] == [0, 1, 2]
    assert (
        "50.0% → 100.0%" in text and "after − before, pass@1: +50.0 points [+50.0, +50.0]" in text
    )
    assert "going on after the first edit is worth +50.0 points" in text


def test_embedded_tokens_are_those_of_the_trajectory(tmp_path):
    _write_run(tmp_path)
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    found = data["trajectories"]
    sample = found["sources"][2]["groups"][0]["samples"][1]
    assert [found["tokens"][i] for i in sample["tokens"]] == [
        [id, f"{HOSTILE}{id}"] for id in range(2, 6)
    ]
    assert sample["logprobs"] == [round(-12.3 * id) for id in range(2, 6)]
    assert sample["versions"] == [[3, 2], [4, 2]]
    assert sample["passed"] is False and sample["turns"][0]["calls"][0]["error"] == HOSTILE


def test_turns_of_a_tree_tell_their_context(tmp_path):
    group = _group(0, [True])
    (linear,) = group.trajectories
    child = dataclasses.replace(linear.contexts[0], parent=0, kept=2)
    tree = dataclasses.replace(
        linear,
        index=1,
        contexts=(*linear.contexts, child),
        # the second one begins with given tokens, the first ends with a turn without tokens
        turns=(*linear.turns, Turn("assistant", 2, 6, "", context=1)),
    )
    _write_run(tmp_path)
    decode = trajectory_log.words_of(tmp_path)._decode
    groups = [dataclasses.replace(group, trajectories=(linear, tree))]
    write_evaluation(tmp_path, "trees.after", 3, groups, decode)
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    (source,) = [one for one in data["trajectories"]["sources"] if one["label"] == "trees.after"]
    plain, found = source["groups"][0]["samples"]
    assert "contexts" not in plain
    assert found["contexts"] == [
        {"start": 0, "parent": -1, "kept": 0},
        {"start": 4, "parent": 0, "kept": 2},
    ]
    spans = [(turn["context"], turn["start"], turn["end"]) for turn in found["turns"]]
    assert spans == [(0, 0, 4), (0, 4, 4), (1, 6, 10)]


def test_nothing_a_model_wrote_becomes_markup(tmp_path):
    _write_run(tmp_path / "hostile")
    _write_run(tmp_path / "tame", text="plain")
    _, hostile, _ = _read(
        write_report(tmp_path / "hostile", tmp_path / "a.html", CONFIG, HOSTILE[:-1])
    )
    _, tame, _ = _read(write_report(tmp_path / "tame", tmp_path / "b.html", CONFIG, "plain"))
    assert hostile.tags == tame.tags


def test_scripts_never_parse_text_as_markup(tmp_path):
    text, _, _ = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "empty"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )


def test_the_page_refers_to_nothing_outside_itself(tmp_path):
    _write_run(tmp_path)
    text, page, _ = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    assert not [
        value
        for name, value in page.attributes
        if name in ("src", "href", "srcset") and value[0] != "#"
    ]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert set(re.findall(r"https?://[^\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


@pytest.mark.parametrize("steps", [0, 1])
def test_an_early_run_has_a_page(tmp_path, steps):
    if steps:
        _write_run(tmp_path, steps)
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    assert len(data["curves"]["steps"]) == len(data["trajectories"]["sources"]) == steps


@pytest.mark.parametrize("megabytes", [0.06, 0.08, 0.2])
def test_the_page_stays_below_its_size(tmp_path, megabytes):
    _write_run(tmp_path, 30, text="<x>" * 40)
    config = ReportConfig(CONFIG.ks, 4, 30, megabytes)
    path = write_report(tmp_path, tmp_path / "report.html", config, "a run")
    _, _, data = _read(path)
    assert path.stat().st_size <= megabytes * 1e6
    assert 0 < data["trajectories"]["embedded"] <= data["trajectories"]["read"] == 120
    last = data["trajectories"]["sources"][-1]
    assert last["step"] == trajectory_steps(tmp_path)[-1]


def test_a_size_that_curves_alone_exceed_is_an_error(tmp_path):
    _write_run(tmp_path)
    with pytest.raises(ValueError, match=r"megabytes=0\.001"):
        write_report(tmp_path, tmp_path / "report.html", ReportConfig((1,), 4, 5, 0.001), "a run")
    assert not (tmp_path / "report.html").exists()


def test_long_runs_are_shown_as_means(tmp_path):
    rows = [{"step": step, "reward/total": step} for step in range(2500)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    curves = data["curves"]
    assert curves["every"] == 3 and len(curves["steps"]) == 834
    assert curves["series"]["reward/total"][:2] == [1.0, 4.0] and curves["steps"][:2] == [2, 5]


def test_every_metric_is_in_exactly_one_place(tmp_path):
    names = ["reward/total", "reward/solved", "policy/kl", "odd/one", "time/step_s", "time/tools_s"]
    names += [
        "policy/mismatch_mean",
        "policy/mismatch_k1",
        "engine/occupancy",
        "actor/total_s",
        "actor/decode_s",
    ]
    with MetricLog(tmp_path) as writer:
        writer.write(0, dict.fromkeys(names, 1.0))
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    curves = data["curves"]
    shown = [name for chart in curves["charts"] + curves["rest"] for name in chart["names"]]
    layers = [layer["name"] for stack in curves["times"] for layer in stack["layers"]]
    assert sorted([*shown, *layers]) == sorted(names)
    assert [chart["names"] for chart in curves["rest"]] == [["odd/one"]]


def test_layers_of_time_add_up_to_the_step_and_to_the_actors_time(tmp_path):
    step = {"step": 10, "screening": 1, "rollout": 6, "update": 2}
    # beside the update too
    actor = {"total": 9, "prefill": 1, "decode": 3, "tool_wait": 2.5, "idle": 2}
    concurrent = {
        "time/tools_s": 40.0,
        "time/grade_s": 20.0,
        "time/tokens_per_s": 1000.0,
        "time/actor_idle": 0.2,
    }
    with MetricLog(tmp_path) as writer:
        times = {
            f"{part}/{name}_s": value
            for part, found in (("time", step), ("actor", actor))
            for name, value in found.items()
        }
        writer.write(0, times | concurrent)
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    of_step, of_actor = (
        {x["label"]: x["values"][0] for x in stack["layers"]} for stack in data["curves"]["times"]
    )
    assert of_step == {"screening": 1, "rollout": 6, "update": 2, "other": 1}
    assert of_actor == {"prefill": 1, "decode": 3, "tool wait": 2.5, "idle": 2, "other": 0.5}


def test_actors_of_other_processes_are_shown_together(tmp_path):
    with MetricLog(tmp_path) as writer:
        for step in range(3):
            writer.write(step, {"reward/total": 1.0})
    for name, steps in (("actor-0", (0, 1, 2, 3)), ("actor-1", (1, 3))):
        with MetricLog(tmp_path / "actors" / name) as writer:
            for step in steps:
                writer.write(
                    step,
                    {
                        "engine/generated_per_s": 100.0,
                        "engine/occupancy": 0.25 * (1 + len(steps) // 4),
                    },
                )
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG, "a run"))
    assert data["curves"]["steps"] == [0, 1, 2]
    assert data["curves"]["series"]["engine/generated_per_s"] == [100, 200, 100]
    assert data["curves"]["series"]["engine/occupancy"] == [0.5, 0.375, 0.5]


def test_any_beginning_of_the_steps_covers_the_run():
    assert spread([], 5) == [] and spread([7], 5) == [7] and spread([3, 8], 5) == [8, 3]
    for count in (1, 2, 9, 100, 200):
        order = spread(range(100), count)
        assert len(order) == len(set(order)) == min(count, 100)
    order = spread(range(0, 1000, 10), 100)
    assert order[:3] == [990, 0, 490]
    gaps = np.diff(sorted(order[:17]))
    assert gaps.max() <= 2 * gaps.min() + 10


def test_flagged_and_mixed_groups_come_first():
    def logged(solved, flags=()):
        samples = [{"solved": s, "reward": {"flags": flags}} for s in solved]
        return {"trajectories": samples, "name": (tuple(solved), flags)}

    groups = [
        logged([True, True]),
        logged([True, False]),
        logged([False, False], ("cheat",)),
        logged([False, True]),
    ]
    found = list(choose(groups, 5))
    assert [group["name"] for group in found] == [groups[i]["name"] for i in (2, 1, 3)]
    assert [len(group["trajectories"]) for group in found] == [2, 2, 1]


def test_two_runs_stand_side_by_side(tmp_path):
    _write_run(tmp_path / "a", 3)
    _write_run(tmp_path / "b", 5)
    for name, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name / "config.json").write_text(
            json.dumps({"train": {"rate": rate, "steps": 5}, "sft": None})
        )
    runs = [tmp_path / "a", tmp_path / "b"]
    text, _, data = _read(write_report(runs, tmp_path / "both.html", CONFIG))
    curves = data["curves"]
    assert curves["steps"] == [0, 1, 2, 3, 4] and curves["run"] == "a"
    assert curves["series"]["reward/total"] == [0.0, 0.1, 0.2, None, None]
    (other,) = curves["others"]
    assert other["run"] == "b" and other["series"]["reward/total"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert {source["run"] for source in data["trajectories"]["sources"]} == {"a", "b"}
    differing = text[text.index("What differs") : text.index("The whole config")]
    assert "train.rate" in differing and "train.steps" not in differing and "sft" not in differing
    assert "b (after) − a (after), pass@1: +0.0 points" in text


def test_a_run_beside_itself_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compared with itself"):
        write_report([tmp_path, tmp_path], tmp_path / "both.html", CONFIG)


def test_evaluations_and_the_warm_start_are_shown(tmp_path):
    _write_run(tmp_path, 1)
    write_evaluation(tmp_path, "held_out.before", 0, [_group(0, [True], text="x")], str)
    with MetricLog(tmp_path / "sft") as writer:
        writer.write(7, {"sft/loss": 2.5})
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG))
    labels = [source["label"] for source in data["trajectories"]["sources"]]
    assert labels == ["step 0", "held_out.before"]
    assert data["warm_start"]["steps"] == [7]
    assert data["warm_start"]["series"]["sft/loss"] == [2.5]


def test_a_search_finds_every_logged_trajectory_and_no_other(tmp_path):
    TEXT_OF[tmp_path] = ""
    for step in range(40):
        text = "Needle" if step == 17 else "hay"
        record_step(tmp_path, step, [_group(step, [True, False], text=text)])
    path = write_report(tmp_path, tmp_path / "report.html", CONFIG, search="nEEdle")
    _, _, data = _read(path)
    (source,) = data["trajectories"]["sources"]
    assert source["label"] == "step 17" and len(source["groups"][0]["samples"]) == 2
    assert data["trajectories"]["embedded"] == data["trajectories"]["read"] == 2
    _, _, without = _read(write_report(tmp_path, tmp_path / "all.html", CONFIG))
    assert len(without["trajectories"]["sources"]) == CONFIG.trajectory_steps


def test_edits_are_shown_as_differences():
    def turn(calls, oks):
        answers = [{"name": "", "content": "", "ok": ok, "seconds": 0} for ok in oks]
        named = [{"name": "t", "arguments": call, "error": ""} for call in calls]
        return [{"calls": named, "results": []}, {"calls": [], "results": answers}]

    turns = [
        *turn([{"path": "a.py", "content": "x = 1\ny = 2\n"}], [True]),
        *turn([{"path": "a.py", "old": "x = 1", "new": "x = 7"}, {"command": "ls"}], [True, True]),
        *turn([{"path": "a.py", "content": "refused\n"}], [False]),
        *turn([{"path": "a.py", "old": "x = 7", "new": "x = 8"}], [True]),
    ]
    calls = [
        call for found in with_diffs(turns, {"a.py": "x = 0\ny = 2\n"}) for call in found["calls"]
    ]
    assert [call.get("diff") for call in calls] == [
        ["@@ -1,2 +1,2 @@", "-x = 0", "+x = 1", " y = 2"],
        ["@@ -1,2 +1,2 @@", "-x = 1", "+x = 7", " y = 2"],
        None,
        None,
        ["@@ -1,2 +1,2 @@", "-x = 7", "+x = 8", " y = 2"],
    ]


def test_a_difference_that_takes_too_long_is_said_and_made_elsewhere(monkeypatch):
    monkeypatch.setattr(edits, "_CPU_S", 0.1)
    before, after = ("".join(f"{i * step % 150}\n" for i in range(9000)) for step in (1, 7))
    assert edits.diff(before, after) == ["@@ no difference: more than 0.1 CPU seconds"]
    assert edits.diff("a\n", "b\n") == ["@@ -1 +1 @@", "-a", "+b"]


def test_every_start_is_written_down(tmp_path):
    for _ in range(2):
        provenance.record(tmp_path)
    with open(tmp_path / provenance.STARTS_FILE, "a") as file:
        file.write('{"time": "cut sho')
    first, second = provenance.read(tmp_path)
    assert first["commit"] and "cpu" in first["devices"].lower() and first["jax"] == second["jax"]
    text, _, _ = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG))
    assert "started 2 times" in text and first["commit"] in text


def test_evaluations_during_training_are_curves_with_intervals(tmp_path):
    _write_run(tmp_path, 4)
    _, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG))
    assert data["evaluations"]["charts"] == []  # before and after stand in the table
    for step, correct in ((1, 1), (3, 0)):
        tasks = tuple(TaskResult(f"{i}", 2, correct * (i % 2), 0, 0, 5.0) for i in range(4))
        SuiteResult("held-out", f"step_{step}", step, {}, tasks).save(tmp_path)
    text, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG))
    found = data["evaluations"]
    assert found["steps"] == [0, 1, 3, 4]
    (chart,) = found["charts"]
    assert chart["names"] == ["held-out/pass@1", "held-out/pass@2"]
    assert found["series"]["held-out/pass@1"] == [0.5, 0.25, 0.0, 1.0]
    lows, highs = found["bands"]["held-out/pass@1"]
    for low, mean, high in zip(lows, found["series"]["held-out/pass@1"], highs, strict=True):
        assert low <= mean <= high
    assert lows[1] < 0.25 < highs[1]
    assert "after − before, pass@1" in text and "step_1 − before" not in text


def test_page_and_command_say_what_the_record_takes_and_what_was_removed(
    tmp_path, monkeypatch, capsys
):
    _write_run(tmp_path, 6)
    store = GroupStore(tmp_path / STORE, "learner")
    compaction = Compaction(store.process, store.folder, 2)
    compaction.run()
    compaction.remove_before(4, 2)
    text, _, data = _read(write_report(tmp_path, tmp_path / "report.html", CONFIG))
    assert "MB per million" in text and "steps 4 to 5" in text
    assert "the steps before 4 were removed from the record" in text
    assert [source["step"] for source in data["trajectories"]["sources"]] == [4, 5]
    for name, value in dict(WORKDIR=str(tmp_path), BESIDE=None, SEARCH="", OUT=None).items():
        monkeypatch.setattr(report, name, SimpleNamespace(value=value))
    with pytest.raises(SystemExit) as refused:
        report.main([""])
    assert refused.value.code == 2 and "it has no config.json" in capsys.readouterr().err
    (tmp_path / CONFIG_FILE).write_text("{}")
    report.main([""])
    told = capsys.readouterr().out
    assert f"record of {tmp_path}: " in told and "MB per million" in told
    assert "; steps 4 to 5; the steps before 4 were removed" in told
    monkeypatch.setattr(report, "SEARCH", SimpleNamespace(value="what nobody wrote"))
    with pytest.raises(SystemExit) as refused:
        report.main([""])
    assert refused.value.code == 2 and "holds 'what nobody wrote'" in capsys.readouterr().err


def test_a_start_that_a_crash_cut_short_hides_no_later_one(tmp_path):
    provenance.record(tmp_path)
    path = tmp_path / provenance.STARTS_FILE
    path.write_text(path.read_text()[:-20])
    provenance.record(tmp_path)
    (start,) = provenance.read(tmp_path)
    assert start["code"] == provenance.describe()["code"]


def test_nothing_is_drawn_of_an_update_without_tokens():
    empty = {
        "step": 0,
        "train/tokens": 0,
        "policy/entropy": 0.0,
        "train/loss": 0.0,
        "reward/x": 0.0,
    }
    full = empty | {"step": 1, "train/tokens": 9}
    series = curves({"run": [empty, full]})["series"]
    assert series["policy/entropy"] == series["train/loss"] == [None, 0.0]
    assert series["reward/x"] == [0.0, 0.0]


def test_a_run_that_learns_nothing_is_told_at_the_top(tmp_path):
    silent = {"reward/signal_groups": 0.0, "episode/malformed_calls": 1.5}
    rows = [silent | {"step": step} for step in range(3)]
    rows.append({"step": 3, "reward/signal_groups": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert f"In 3 of 4 training steps of {tmp_path.name} no group had rewards that differ" in page
    assert "Of all groups 88% had no signal; episodes had 1.1 malformed calls" in page
    assert "docs/no_reward.md" in page
    # stores of earlier steps were credited
    rows = [row | {"train/credited": 0.1} for row in rows[:2]] + rows[2:]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        "had rewards that differ"
        not in write_report(tmp_path, tmp_path / "report.html").read_text()
    )


def test_the_headline_of_a_suite_is_its_first_column_after_the_name(tmp_path):
    _write_run(tmp_path)
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    headings = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", page[page.index('<table class="suite">') :])
    assert headings[:3] == ["weights", "whole episode, pass@1", ""]
