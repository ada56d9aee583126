"""Plays one suite of a config with the weights of a run, or with those a run starts from.

The untrained weights, and the newest checkpoint of a run:

    python -m launch.evaluate --config=configs/smollm2_mbpp.py --suite=humaneval
    python -m launch.evaluate --config=configs/smollm2_mbpp.py --suite=humaneval --workdir=runs/mbpp

    --greedy              one greedy sample per task instead of the suite's own sampling
    --step=20             another checkpoint of the workdir
    --against=runs/other  also another run's newest checkpoint, compared task by task
                          ("start" stands for the untrained weights), or a result that was saved:
                          --against=runs/other/evaluations/humaneval.step_20.json
    --path=tasks.jsonl    of a suite that is read from a path and need not be in the config
                          (leetcode, swe, humanevalfix, ...; rl_code/evaluation/suites.py)
    --suite_settings={..} what else its source is told, as JSON
    --contamination       which of its tasks are among the training tasks, and the result without
    --predictions=p.jsonl what agents handed in, in SWE-bench's form, one patch for each task; of
                          several samples the others go to p.1.jsonl and so on

A model that is served anywhere by the OpenAI chat API, with the same tasks, tools and graders, or
the same agent of others where the config has a harness:

    python -m launch.evaluate --config=configs/own_model.py --suite=held_out \\
        --endpoint=http://127.0.0.1:8000/v1 --endpoint_model=name

    --endpoint_key=NAME   the variable of the environment that holds the API key
    --against=runs/gpt    the suite's saved result in that workdir, or one that a file holds; the
                          weights of a run are played by a command of their own before

--greedy, --path, --suite_settings, --contamination and --predictions are for both.

Results are written to <workdir>/evaluations; those of the untrained weights to
runs/untrained_<config>/evaluations.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from launch import evaluate_endpoint, evaluate_report, flags
from launch.step import STEP
from rl_code.checkpoint import checkpoint
from rl_code.config import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.evaluation.contamination import Overlap, overlaps
from rl_code.evaluation.endpoint import EndpointError
from rl_code.evaluation.predictions import Predictions
from rl_code.evaluation.suite import SuiteResult
from rl_code.evaluation.suites import SUITES, OfPath, SuiteConfig
from rl_code.harness.agent import HarnessError
from rl_code.metrics.progress import Progress
from rl_code.rollout.playing import RolloutTimeout
from rl_code.run.config import RunConfig, meshes
from rl_code.run.run import Run, no_checkpoint
from rl_code.tasks.api import find_source
from rl_code.types import Trajectory

START = "start"

FLAGS = absl_flags.FLAGS
absl_flags.DEFINE_string("suite", None, "Name of one of the config's suites.")
absl_flags.DEFINE_bool("greedy", False, "One greedy sample per task.")
absl_flags.DEFINE_string(
    "against",
    None,
    f"What to compare with: the workdir of a run, {START!r}, or a saved result.",
)

PATH = absl_flags.DEFINE_string("path", None, "File or folder of a suite that is read from one.")
SETTINGS = absl_flags.DEFINE_string("suite_settings", "{}", "Settings of its source, as JSON.")
CONTAMINATION = absl_flags.DEFINE_bool(
    "contamination", False, "Look for tasks of the suite among the training tasks."
)
PREDICTIONS = absl_flags.DEFINE_string(
    "predictions", None, "File for patches in SWE-bench's form, .jsonl or .json."
)


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    if PATH.value:
        with config.unlocked(), config.ignore_type():
            config.suites = (*config.suites, suite_of_path(FLAGS.suite, PATH.value))
    run_config = read_config.build(RunConfig, config)
    suite = choose_suite(run_config, FLAGS.suite, FLAGS.greedy)
    if evaluate_endpoint.ENDPOINT.value:
        if STEP.value is not None:
            raise read_config.ConfigError(
                "--step is that of a run's checkpoint; leave it out with --endpoint"
            )
        evaluate_endpoint.evaluate(
            run_config,
            suite,
            workdir,
            against=FLAGS.against,
            contamination=CONTAMINATION.value,
            predictions=PREDICTIONS.value,
        )
        return
    if workdir and not checkpoint.steps(workdir):  # before a folder is made there
        raise read_config.ConfigError(no_checkpoint(workdir))
    file, _, _ = config_flags.get_config_filename(FLAGS["config"]).partition(":")
    folder = Path(workdir or f"runs/untrained_{Path(file).stem}")
    folder.mkdir(parents=True, exist_ok=True)
    flags.use_virtual_devices(*meshes(run_config))
    saved = None
    if FLAGS.against and FLAGS.against.endswith(evaluate_report.SAVED):
        saved = evaluate_report.saved_result(FLAGS.against, suite)
    with Run(run_config, folder) as run, jax.set_mesh(run.mesh):
        if saved is not None:
            evaluate_report.refuse_other_tasks(saved, run.task_sets.of_suite(suite), suite)
        found = contamination_of(run, suite) if CONTAMINATION.value else None
        results = [evaluate(run, suite, workdir or START, STEP.value, PREDICTIONS.value)]
        if FLAGS.against:
            results.insert(0, saved or evaluate(run, suite, FLAGS.against, None))
    results[-1].save(folder)
    evaluate_report.tell(suite, results, (FLAGS.against, workdir or START), found)


def suite_of_path(name: str | None, path: str) -> dict[str, Any]:
    """The section of a suite that is read from a path. Raises ConfigError."""
    try:
        settings = json.loads(SETTINGS.value)
    except ValueError as error:
        raise read_config.ConfigError(f"--suite_settings is no JSON: {error}") from error
    of_path = [name for name, one in SUITES.items() if isinstance(one, OfPath)]
    if name not in of_path:
        raise read_config.ConfigError(
            f"--suite={name}: with --path it must be one of {', '.join(of_path)}"
        )
    return {"name": name, "path": path, "settings": settings}


def contamination_of(run: Run, suite: SuiteConfig) -> list[Overlap]:
    """The suite's tasks that are among the training tasks. Raises ConfigError for training tasks
    without end, which cannot be gone through.
    """
    if find_source(run.config.tasks, "config.tasks").endless:
        raise read_config.ConfigError(
            f"--contamination: the training tasks of {run.config.tasks.name!r} have no end"
        )
    return overlaps(run.task_sets.of_suite(suite), run.task_sets.training)


def choose_suite(config: RunConfig, name: str | None, greedy: bool) -> SuiteConfig:
    """The suite of that name; greedy decoding makes it a suite of its own. Raises ConfigError for
    an unknown name and for none.
    """
    suites = {suite.name: suite for suite in config.suites}
    if not name:
        raise read_config.ConfigError(
            f"--suite=<name> is missing: name one of the config's suites: {', '.join(suites)}"
        )
    if name not in suites:
        raise read_config.ConfigError(
            f"--suite={name} is not one of the config's suites: {', '.join(suites)}"
        )
    suite = suites[name]
    if not greedy:
        return suite
    sampling = dataclasses.replace(suite.sampling, temperature=0.0)
    return dataclasses.replace(suite, name=f"{name}_greedy", samples=1, sampling=sampling)


def evaluate(
    run: Run, suite: SuiteConfig, source: str, step: int | None, predictions: str | None = None
) -> SuiteResult:
    """Plays the suite with the weights of a workdir, or with the run's own initial ones where
    source is "start". predictions: a file for what was handed in.
    """
    if source == START:
        model, label, step = run.init_model(), START, 0
    else:
        model, step = run.saved_model(source, step)
        label = f"step_{step}"
    total = len(run.task_sets.of_suite(suite)) * suite.samples
    with Progress(f"{suite.name} {label}", total) as progress:
        solved: list[bool] = []

        def count(trajectory: Trajectory) -> None:
            solved.append(trajectory.solved)
            progress.update(len(solved), pass_rate=sum(solved) / len(solved))

        made = Predictions(label if source == START else f"{source}, {label}", run.pool.layers)
        on_work = made.add if predictions else None
        played = {"label": label, "step": step, "on_finished": count, "on_work": on_work}
        result = run.evaluate(suite, model, **played)
    if predictions:
        for path in made.save(Path(predictions)):
            flags.console().print(f"predictions: {path}", soft_wrap=True)
    return result


if __name__ == "__main__":
    flags.run(
        main,
        kind=RunConfig,
        needs_workdir=False,
        expected=(SandboxUnavailable, RolloutTimeout, EndpointError, HarnessError),
    )
