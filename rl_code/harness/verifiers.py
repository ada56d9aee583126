"""verifiers: an environment of the package verifiers plays its own episodes.

It is no dependency of this project. Put it into an environment of its own, with the packages of the
environments (0.4 has tasksets, harnesses and environments in ``verifiers.v1``):

    python -m venv vf && vf/bin/pip install verifiers==0.4.0

    tasks=dict(name="verifiers", python="vf/bin/python", taskset="my_taskset")
    harness="verifiers"
    reward=dict(signals=("score",))

All of it is unmodified: the taskset says what is asked, the harness of a role asks the policy, the
environment answers, ends the episode and says what it is worth (``verifiers_driver.py``). Rewards
and metrics are ``Trajectory.scores``, which the signal ``score`` reads. What an environment does
with the text of a message it does beside the sandbox, with this user's rights, so it must be one
that executes none of it here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rl_code.harness.agent import Agent, Ending, EpisodeFacts, HarnessError, Host
from rl_code.harness.forking import LAST_WORDS, ForkingHost, find_python

# The key of a task's meta that says where its environment is, as the source wrote it.
META = "verifiers"
# The name of the score that is 1 where an environment failed over what the policy did.
FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Verifiers(Agent):
    """The environments of the tasks of the source ``verifiers``."""

    scores: ClassVar[bool] = True

    def host(self) -> VerifiersHost:
        return VerifiersHost()


class VerifiersHost(Host):
    """A process for each Python that a task names."""

    def __init__(self) -> None:
        self._hosts: dict[str, EnvironmentHost] = {}
        self._lock = threading.Lock()

    def start(self, job: EpisodeFacts, on_end: Callable[[Ending], None]) -> Callable[[], None]:
        if META not in job.task.meta:
            raise HarnessError(
                f"task {job.task.id} is of no environment of verifiers: with harness='verifiers' "
                "all tasks are of the source 'verifiers'"
            )
        place = job.task.meta[META]
        with self._lock:
            if place["python"] not in self._hosts:
                self._hosts[place["python"]] = EnvironmentHost(place["python"])
            host = self._hosts[place["python"]]
        return host.start(job, lambda ending: on_end(judged(ending, place, job.task.id)))

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


def judged(ending: Ending, place: Mapping[str, Any], name: str) -> Ending:
    """An ending with what the task's settings say of it: whether it is solved, and what an episode
    is worth over which the environment failed.
    """
    if ending.scores is None:
        return ending
    scores = dict(ending.scores)
    failed = bool(ending.cause)
    if failed:
        message = "%s: the environment failed over what the policy did: %s"
        logging.warning(message, name, ending.cause)
        scores["reward"] = place["failed_reward"]
    scores[FAILED] = float(failed)
    solved = not failed and scores["reward"] >= place["solved_at"]
    return dataclasses.replace(ending, scores=scores, solved=solved)


class EnvironmentHost(ForkingHost):
    """The process that has imported the package, and loads environments."""

    package = "verifiers"
    requirement = "verifiers==0.4.0"
    driver = Path(__file__).with_name("verifiers_driver.py")
    key = "tasks.python"

    @staticmethod
    def environment(folder: str) -> dict[str, str]:
        """This process's own, for models that judge and caches of data sets, but for what is said
        to our Python. No proxy stands before the endpoint.
        """
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
        }
        direct = [own.get("NO_PROXY") or own.get("no_proxy"), "127.0.0.1"]
        around = ",".join(filter(None, direct))
        return own | {
            "NO_PROXY": around,
            "no_proxy": around,
            "RL_CODE_VERIFIERS_FOLDER": folder,
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }

    def describe(self, job: EpisodeFacts) -> dict[str, Any]:
        return dict(job.task.meta[META]) | {"turns": job.limits.turns, "here": os.getcwd()}

    def ending(self, said: Mapping[str, Any]) -> Ending:
        if "scores" not in said:
            return Ending(False, f"{said['status']}: {said['error']}", fault=True)
        for name, value in said["scores"].items():
            if type(value) not in (int, float) or not math.isfinite(value):
                return Ending(False, f"its {name} is {value!r}, no finite number", fault=True)
        scores = {name: float(value) for name, value in said["scores"].items()}
        return Ending(True, said.get("error", ""), scores=scores)


def list_rows(python: str, place: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tasks of an environment, each ``{"id": ..., "messages": [...]}``.

    place: taskset, env, select and folder, as in a task's meta. Raises HarnessError.
    """
    said = listed(python, place)
    if "error" in said:
        raise HarnessError(f"tasks.taskset = {place['taskset']!r}: {said['error']}")
    return said["rows"]


def listed(python: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a process of its own (``verifiers_driver.listed``)."""
    python = find_python(python)
    host = EnvironmentHost
    with tempfile.TemporaryDirectory(prefix="verifiers_") as folder:
        try:
            done = subprocess.run(
                [python, "-P", str(host.driver)],
                input=json.dumps(dict(place)),
                env=host.environment(folder),
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise HarnessError(f"{host.key} = {python!r} cannot be started: {error}") from error
    if done.returncode:
        raise HarnessError(host.missing(python, done.stderr.strip()[-LAST_WORDS:]))
    return json.loads(done.stdout)
