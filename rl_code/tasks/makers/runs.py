"""Runs of tests of a package in sandboxes: what the host asks for, and what comes back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.types import World

_PROGRAM = Path(__file__).with_name("inside.py")
# Seconds of a command besides those of its jobs.
_START_S = 60.0
_LONGEST_S = 1800.0


@dataclasses.dataclass(frozen=True)
class SuiteRun:
    """Some test files, run on a workspace with some files changed."""

    # A name that no other job of the same call has.
    name: str
    # Path -> text of the files that are laid over the world; None for one that is taken away.
    files: Mapping[str, str | None]
    # Paths of test files.
    targets: tuple[str, ...]
    # CPU seconds, and wall-clock seconds, which are many more for machines that are busy.
    cpu_s: int = 5
    timeout_s: float = 60.0
    # True to note the code that each test runs.
    traced: bool = False
    # True if failed asserts say what they compared.
    explained: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a job."""

    # Id -> "passed", "failed" or "skipped".
    tests: Mapping[str, str]
    # Id -> CPU seconds.
    seconds: Mapping[str, float]
    # Id -> the exception of a failed test, cut.
    said: Mapping[str, str]
    # Test files that could not be imported -> why.
    errors: Mapping[str, str]
    # "" when pytest came to its end, else what ended it: "timeout", "lost", "ended with …".
    ending: str
    # Trace of a traced job, as ``inside.Recorder.result`` has it.
    trace: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def passed(self) -> frozenset[str]:
        """Ids of the tests that passed."""
        return frozenset(test for test, how in self.tests.items() if how == "passed")

    def failed(self) -> frozenset[str]:
        """Ids of the tests that failed."""
        return frozenset(test for test, how in self.tests.items() if how == "failed")


LOST = Outcome({}, {}, {}, {}, "lost")


def sandbox_config(layers: Path) -> SandboxConfig:
    """Sandboxes for makers: commands run many tests, so their limits are wide.

    layers: the folder of the layer store.
    """
    return SandboxConfig(
        workers=2,
        memory_mb=1536,
        processes=64,
        workspace_mb=64,
        cpu_s=900,
        output_bytes=32 << 20,
        layers=str(layers),
    )


class Runner:
    """Runs jobs, and counts the CPU time that they take. One thread at a time."""

    def __init__(self, pool: SandboxPool):
        self._pool = pool
        # CPU seconds of all commands so far.
        self.cpu_s = 0.0

    def run(self, world: World, jobs: Sequence[SuiteRun], hash_seed: int = 0) -> dict[str, Outcome]:
        """Run jobs, and return their outcomes by name of job. All of them run in a fresh sandbox;
        if a job brings that down, the jobs after it run in another.

        hash_seed: the seed of Python's hashes, so that what depends on the order of a set shows.
        Raises SandboxFault.
        """
        left = list(jobs)
        found: dict[str, Outcome] = {}
        while left:
            answers = self._command(world, left, hash_seed)
            found |= answers
            left = [job for job in left if job.name not in found]
            if left:  # the first of them was running
                found[left[0].name] = LOST
                left = left[1:]
        return found

    def _command(
        self, world: World, jobs: Sequence[SuiteRun], hash_seed: int
    ) -> dict[str, Outcome]:
        """Run jobs by one command; outcomes of the jobs that it came to the end of, by name."""
        request = json.dumps({"jobs": [dataclasses.asdict(job) for job in jobs]})
        argv = ["env", f"PYTHONHASHSEED={hash_seed}", "python", "-c", _PROGRAM.read_text()]
        # no call waits longer than that, however many jobs hang
        timeout_s = _START_S + min(sum(job.timeout_s for job in jobs), _LONGEST_S)
        with self._pool.open({}, world) as sandbox:
            done = sandbox.run(argv, stdin=request, timeout_s=timeout_s)
        self.cpu_s += done.cpu_s
        found = {}
        for line in done.stdout.splitlines():
            try:
                answer = json.loads(line)
            except ValueError:  # cut off when the sandbox came down
                continue
            if isinstance(answer, dict) and "name" in answer:
                found[answer["name"]] = _outcome(answer)
        return found


def _outcome(answer: dict[str, Any]) -> Outcome:
    tests = answer["tests"]
    return Outcome(
        tests={test: how for test, (how, _, _) in tests.items()},
        seconds={test: seconds for test, (_, seconds, _) in tests.items()},
        said={test: said for test, (_, _, said) in tests.items() if said},
        errors=answer["errors"],
        ending=answer["ending"],
        trace=answer if "calls" in answer else {},
    )
