"""Calls of the package verifiers (see ``verifiers``). It runs in a Python that has the
package, and uses nothing else but the standard library.

As a program it reads from standard input which environment is meant, ``{"environment": ...,
"args": {...}, "split": ..., "folder": ...}``, and writes ``{"rows": [...]}`` or ``{"error": ...}``.
Episodes are run by ``forking_driver``: they are told the same, ``"index"`` (the row) and the
endpoint, and end with ``{"scores": {...}, "solved": ...}``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

# The variable in which the package looks for the key of the endpoint.
_KEY = "RL_CODE_EPISODE_KEY"


class NoEnvironment(Exception):
    """An environment that cannot be used; the message says why."""


class Package:
    """The parts that are used of verifiers."""

    def __init__(self) -> None:
        package = importlib.import_module("verifiers")
        if not hasattr(package, "load_environment"):
            raise ImportError(
                f"verifiers {package.__version__} has no load_environment(name, **args), which "
                "the environments of versions up to 0.3.1 need"
            )
        self._load_environment = package.load_environment
        self._client = importlib.import_module("verifiers.types").ClientConfig
        self._errors = importlib.import_module("verifiers.errors")
        self._loaded: dict[str, Any] = {}

    def load(self, place: Mapping[str, Any]) -> Any:
        """The environment, loaded once. Raises NoEnvironment, and whatever its own code raises."""
        key = json.dumps([place["environment"], place["args"], place["folder"]])
        if key not in self._loaded:
            if place["folder"] and place["folder"] not in sys.path:
                sys.path.insert(0, place["folder"])
            environment = self._load_environment(place["environment"], **place["args"])
            if environment.requires_group_rollouts:
                raise NoEnvironment(
                    "it compares the episodes of a group, which are played one by one here; "
                    "give it rewards for single episodes"
                )
            self._loaded[key] = environment
        return self._loaded[key]

    def rows(self, place: Mapping[str, Any]) -> Any:
        """The rows of a split. Raises NoEnvironment."""
        environment = self.load(place)
        train = place["split"] == "train"
        rows = environment.build_dataset() if train else environment.build_eval_dataset()
        if rows is None or not len(rows):
            raise NoEnvironment(
                f"it has no rows of the split {place['split']!r}: load_environment gave "
                f"{'dataset' if train else 'eval_dataset'} {'None' if rows is None else 'no rows'}"
            )
        return rows

    def prepare(self, job: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Player of a row."""
        environment = self.load(job)
        row = self.rows(job)[job["index"]]
        return lambda: asyncio.run(self.play(environment, row, job))

    def faults(self) -> set[str]:
        """Names of errors that end an episode through no fault of the policy's: the endpoint, or
        what the environment relies on, failed. What an episode is worth that ended in another one
        is the environment's to say.
        """
        return names_of(self._errors.InfraError) | {"ModelError"}

    async def play(self, environment: Any, row: Any, job: Mapping[str, Any]) -> dict[str, Any]:
        """Has the environment play a row by itself."""
        os.environ[_KEY] = job["key"]
        client = self._client(
            api_key_var=_KEY, api_base_url=job["base_url"], connect_timeout=60.0, max_retries=2
        )
        done = await environment.run_rollout(row, client, job["model"], {})
        error = done.get("error")
        if error is not None and error["error"] in self.faults():
            return {"status": error["error"], "error": error["error_chain_repr"]}
        reward = done["reward"]
        scores = {**(done.get("metrics") or {}), "reward": reward}
        return {"scores": scores, "solved": bool(reward >= environment.pass_threshold)}


def names_of(error: type[BaseException]) -> set[str]:
    """The names of a kind of error, and of all that are of this kind."""
    return {error.__name__}.union(*map(names_of, error.__subclasses__()))


def messages(prompt: Any) -> list[dict[str, str]]:
    """The prompt of a row: role and text of each message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": one["role"], "content": text_of(one.get("content"))} for one in prompt]


def text_of(content: Any) -> str:
    """The text of a message that may come in parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def main() -> None:
    """Lists the rows of an environment."""
    channel = os.dup(1)
    os.dup2(2, 1)  # what an environment prints is not part of the answer
    package = Package()
    place = json.load(sys.stdin)
    try:
        rows = package.rows(place)
        listed = [
            {"id": str(row["example_id"]), "messages": messages(row["prompt"])} for row in rows
        ]
        said: dict[str, Any] = {"rows": listed}
    except Exception as error:  # of the environment's own code, for its author to read
        said = {"error": str(error) if isinstance(error, NoEnvironment) else repr(error)}
    with os.fdopen(channel, "w") as out:
        json.dump(said, out)


if __name__ == "__main__":
    main()
