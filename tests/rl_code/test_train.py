"""Properties of the loop's parts that need no run."""

from __future__ import annotations

import dataclasses
import types

from rl_code import train as train_lib
from rl_code.evaluation.suite import SuiteResult, TaskResult, load_all


def test_a_suite_is_played_again_when_a_finished_run_was_trained_further(tmp_path, capsys):
    suite = types.SimpleNamespace(name="held_out", samples=1)
    played = []

    def evaluate(suite, model, *, label, step, on_finished) -> SuiteResult:
        played.append((label, step))
        return SuiteResult(suite.name, label, step, {}, (task,))

    task = TaskResult(**{field.name: 1 for field in dataclasses.fields(TaskResult)} | {"id": "t"})
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(suites=(suite,)),
        workdir=tmp_path,
        suite_tasks=lambda suite: [task],
        evaluate=evaluate,
    )
    for step in (5, 5, 7):
        train_lib.evaluate(run, None, "after", step)
    assert played == [("after", 5), ("after", 7)]
    assert [(r.label, r.step) for r in load_all(tmp_path)] == [("step_5", 5), ("after", 7)]
