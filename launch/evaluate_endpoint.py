"""The part of ``launch.evaluate`` for a model that somebody else serves."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags as absl_flags
from absl import logging

from launch import flags
from launch.evaluate_report import refuse_other_tasks, saved_result, tell
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.contamination import overlaps
from rl_code.evaluation.endpoint import ChatEpisode, PlayedEpisode, Served, Server, play_suite
from rl_code.evaluation.endpoint_agent import ForwardedEpisode
from rl_code.evaluation.predictions import Predictions
from rl_code.evaluation.suite import SuiteResult
from rl_code.evaluation.suites import SuiteConfig
from rl_code.harness.api import find_agent
from rl_code.harness.harness import Harness
from rl_code.metrics.progress import Progress
from rl_code.rewards.combine import find_reward
from rl_code.run.config import RunConfig
from rl_code.tasks.api import find_source
from rl_code.types import Task, Trajectory

ENDPOINT = absl_flags.DEFINE_string(
    "endpoint",
    None,
    "Base URL of an OpenAI chat API whose model is judged, as http://host:8000/v1.",
)
MODEL = absl_flags.DEFINE_string("endpoint_model", None, "The name of the model there.")
KEY = absl_flags.DEFINE_string(
    "endpoint_key", "OPENAI_API_KEY", "Variable of the environment that holds the API key, if any."
)


def evaluate(
    config: RunConfig,
    suite: SuiteConfig,
    workdir: str | None,
    *,
    against: str | None = None,
    contamination: bool = False,
    predictions: str | None = None,
) -> None:
    """Plays a suite with the model of the flags, writes its result down and prints it.

    against: a saved result, as of ``evaluate_report.saved_result``. contamination: whether to look
    for its tasks among the training tasks. predictions: a file for what was handed in.
    """
    if not MODEL.value:
        raise ConfigError("--endpoint_model=<name> is missing: name the model that is served there")
    asked = server()
    label = re.sub(r"[^\w.-]+", "_", MODEL.value)
    folder = Path(workdir or f"runs/{label}")
    before = saved_result(against, suite) if against else None
    found = None

    def check(tasks: Sequence[Task], pool: SandboxPool) -> None:
        nonlocal found
        if before is not None:
            refuse_other_tasks(before, tasks, suite)
        if contamination:
            found = overlaps(tasks, _training_tasks(config, pool, folder))

    made = Path(predictions) if predictions else None
    result = play(config, suite, asked, label, folder, made, check)
    result.save(folder)
    results = [result] if before is None else [before, result]
    tell(suite, results, (against or "", str(folder)), found)


def server() -> Server:
    """The server of the flags."""
    url = ENDPOINT.value
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint={url} must be a URL, such as http://127.0.0.1:8000/v1")
    return Server(url, MODEL.value, os.environ.get(KEY.value, ""))


def play(
    config: RunConfig,
    suite: SuiteConfig,
    server: Server,
    label: str,
    folder: Path,
    predictions: Path | None = None,
    check: Callable[[Sequence[Task], SandboxPool], None] = lambda tasks, pool: None,
) -> SuiteResult:
    """The result of a suite with a served model: by the config's agent of others, or by our own
    with the config's tools.

    predictions: a file for what was handed in. check: called with the tasks before they are played.
    Raises EndpointError, HarnessError.
    """
    sampling = suite.sampling or config.rollout.sampling
    if sampling.top_k:
        raise ConfigError(
            f"suite {suite.name}: sampling.top_k={sampling.top_k}, which the chat API has no place "
            "for; set it to 0"
        )
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(SandboxPool(config.sandbox))
        make_episode = _episodes(config, stack)
        tasks = _tasks(suite, pool, folder, config.documents is not None)
        check(tasks, pool)
        made = Predictions(label, pool.layers)
        served = Served(
            pool=pool,
            limits=suite.limits or config.limits,
            reward=find_reward(config.reward),
            server=server,
            sampling=sampling,
            on_work=made.add if predictions else None,
            documents=config.documents,
        )

        def episode(task: Task, index: int) -> PlayedEpisode:
            return make_episode(task, served, index=index, seed=config.seed + index)

        with Progress(
            f"{suite.name} {label}", len(tasks) * suite.samples, compiles=False
        ) as progress:
            solved: list[bool] = []

            def count(trajectory: Trajectory) -> None:
                solved.append(trajectory.solved)
                progress.update(len(solved), pass_rate=sum(solved) / len(solved))

            groups = play_suite(
                tasks,
                episode,
                samples=suite.samples,
                workers=config.rollout.workers,
                folder=folder,
                name=f"{suite.name}.{label}",
                on_finished=count,
            )
    if predictions:
        for path in made.save(predictions):
            flags.console().print(f"predictions: {path}", soft_wrap=True)
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "url": server.url}
    return suite_lib.from_groups(suite.name, label, 0, settings, groups)


def _episodes(config: RunConfig, stack: contextlib.ExitStack) -> Callable[..., PlayedEpisode]:
    """Maker of an episode: of the agent of others that the config names, which ends with the
    stack, or of our own.
    """
    if config.harness is not None:
        harness = Harness(find_agent(config.harness, "config.harness"))
        stack.callback(harness.close)
        return functools.partial(ForwardedEpisode, harness=harness)
    tools = find_tools(config.tools)
    delegating = [name for name, tool in tools.items() if tool.delegation is not None]
    if delegating:
        left_out = "the served model is not offered %s: sub-agents would be of another policy"
        logging.warning(left_out, ", ".join(delegating))
    return functools.partial(ChatEpisode, tools=tools)


def _training_tasks(config: RunConfig, pool: SandboxPool, folder: Path) -> Sequence[Task]:
    """The training tasks, whatever the length of their prompts. Raises ConfigError."""
    source = find_source(config.tasks, "config.tasks")
    if source.endless:
        raise ConfigError(
            f"--contamination: the training tasks of {config.tasks.name!r} have no end"
        )
    return source.load(pool, folder)


def _tasks(suite: SuiteConfig, pool: SandboxPool, folder: Path, documents: bool) -> list[Task]:
    """The tasks of a suite, whatever the length of their prompts; the shortest ones by characters,
    since nothing is tokenised here. documents: True if the server is told of documents. Raises
    ConfigError.
    """
    source = find_source(suite.tasks, f"suites.{suite.name}.tasks")
    kept = suite.choose(source.one_by_one(pool, folder), _characters, "are there")
    for task in kept:
        if task.prefill:
            raise ConfigError(
                f"suite {suite.name}: task {task.id} begins the assistant's message itself, which "
                "the chat API has no place for; take a form for chats (tasks.form)"
            )
        texts = all(isinstance(message["content"], str) for message in task.messages)
        if not texts and not documents:
            raise ConfigError(
                f"suite {suite.name}: task {task.id} has documents in its prompt, which the chat "
                "API has no place for; a server of ours takes them, where the config has documents"
            )
    return kept


def _characters(task: Task) -> int:
    return sum(len(str(message["content"])) for message in task.messages)
