"""The part of ``launch.evaluate`` for a model that somebody else serves."""

from __future__ import annotations

import os
import re
from pathlib import Path

from absl import flags as absl_flags

from launch import flags
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.endpoint import ChatEpisode, Server, play_suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.evaluation.suites import SuiteConfig
from rl_code.progress import Progress
from rl_code.read_config import ConfigError
from rl_code.rewards.combine import find_signals
from rl_code.run_config import RunConfig
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
    config: RunConfig, suite: SuiteConfig, workdir: str | None, against: str | None
) -> None:
    """Plays a suite with the model of the flags, writes its result down and prints it."""
    if not MODEL.value:
        raise ConfigError("--endpoint_model=<name> is missing: name the model that is served there")
    if against:
        raise ConfigError("--against compares weights of runs; leave it out with --endpoint")
    label = re.sub(r"[^\w.-]+", "_", MODEL.value)
    folder = Path(workdir or f"runs/{label}")
    result = play(config, suite, server(), label, folder)
    result.save(folder)
    ks = sorted({k for k in (1, suite.samples) if k <= result.largest_k})
    flags.console().print(suite_lib.tables([result], ks))


def server() -> Server:
    """The server of the flags."""
    url = ENDPOINT.value
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint={url} must be a URL, such as http://127.0.0.1:8000/v1")
    return Server(url, MODEL.value, os.environ.get(KEY.value, ""))


def play(
    config: RunConfig, suite: SuiteConfig, server: Server, label: str, folder: Path
) -> SuiteResult:
    """The result of a suite with a served model. Raises EndpointError."""
    tools = find_tools(config.tools)
    signals = find_signals(config.reward)
    limits = suite.limits or config.limits
    sampling = suite.sampling or config.rollout.sampling
    with SandboxPool(config.sandbox) as pool:
        tasks = _tasks(suite, pool, folder)

        def episode(task: Task, index: int) -> ChatEpisode:
            return ChatEpisode(
                task,
                index=index,
                tools=tools,
                pool=pool,
                limits=limits,
                reward=signals,
                server=server,
                sampling=sampling,
                seed=config.seed + index,
            )

        with Progress(f"{suite.name} {label}", len(tasks) * suite.samples) as progress:
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
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "url": server.url}
    return suite_lib.from_groups(suite.name, label, 0, settings, groups)


def _tasks(suite: SuiteConfig, pool: SandboxPool, folder: Path) -> list[Task]:
    """The first tasks of a suite, whatever the length of their prompts. Raises ConfigError."""
    tasks = find_source(suite.tasks, f"suites.{suite.name}.tasks").load(pool, folder)
    kept: list[Task] = []
    for task in tasks:
        if suite.count and len(kept) == suite.count:
            break
        if suite.keeps(task):
            kept.append(task)
    for task in kept:
        if task.prefill:
            raise ConfigError(
                f"suite {suite.name}: task {task.id} begins the assistant's message itself, which "
                "the chat API has no place for; take a form for chats (tasks.form)"
            )
        if not all(isinstance(message["content"], str) for message in task.messages):
            raise ConfigError(
                f"suite {suite.name}: task {task.id} has documents in its prompt, which the chat "
                "API has no place for"
            )
    return kept
