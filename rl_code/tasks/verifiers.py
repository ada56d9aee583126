"""verifiers: the tasks of a taskset of the package verifiers, whose environment plays them itself.

See ``rl_code.harness.verifiers`` for how. A task has the prompt for the record, no files and no
tests: the environment says what the work is worth.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.harness.agent import HarnessError
from rl_code.harness.verifiers import META, list_rows
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import Source
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class Verifiers(Source):
    """The selected tasks of a taskset, in its order."""

    # Id of the taskset: a package, or a module in ``folder``.
    taskset: str
    # The Python that has verifiers; "" for the one that runs this.
    python: str = ""
    # Rest of the [env] block of the package's configs: id, taskset, and a section for each role,
    # such as dict(agent=dict(harness=dict(id="bash"), runtime=dict(type="docker"))).
    env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Section [select] of the package's configs: include, exclude, shuffle, seed, skip, limit.
    select: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # A folder of modules, for tasksets that are not installed there; "" for none.
    folder: str = ""
    # Whether what a rollout runs, where its runtime is the package's "subprocess", runs in the
    # episode's sandbox. False: on this machine, with this user's rights, as the package does it,
    # the policy's commands and its code among it.
    sandboxed: bool = True
    # Least reward of an episode that counts as solved.
    solved_at: float = 1.0
    # Reward of an episode in which the environment's own code failed over what the policy did. It
    # should be no more than an honest failure gets.
    failed_reward: float = 0.0

    harness: ClassVar[str] = "verifiers"

    def __post_init__(self) -> None:
        for key in ("env", "select"):
            try:
                json.dumps(plain(getattr(self, key)))
            except TypeError as error:
                raise ValueError(f"{key}={getattr(self, key)!r} is no JSON: {error}") from error

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        place = {
            "taskset": self.taskset,
            "env": plain(self.env),
            "select": plain(self.select),
            "folder": self.folder and os.path.abspath(self.folder),
            "sandboxed": self.sandboxed,
        }
        try:
            rows = list_rows(self.python, place)
        except HarnessError as error:
            raise TaskFileError(str(error)) from error
        worth = {"solved_at": self.solved_at, "failed_reward": self.failed_reward}
        return [
            Task(
                id=f"{self.taskset}/{row['id']}",
                messages=tuple(row["messages"]),
                meta={
                    "source": "verifiers",
                    "row": row["id"],
                    META: {"python": self.python, **place, **worth, "index": index},
                },
            )
            for index, row in enumerate(rows)
        ]


def plain(value: Any) -> Any:
    """A setting of a config as JSON has it: dicts, and lists for tuples."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value
