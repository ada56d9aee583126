"""Grades work by a program that writes what it is worth into a file: Harbor's way.

Each run has a fresh sandbox over the task's world, with the program's files at /tests, an empty
/logs/verifier, and of the agent's work what is the agent's to change (suites/applied.py). When the
program and all that it has started are gone, the reward is read: reward.json if there is one, else
reward.txt.

The work runs as the user of the program, so it can write that file itself, or let the program
believe that its tests passed. What is paid is therefore run three times more: once as it is, which
pays the lesser reward, and twice with the expected values of the program's tests changed
(suites/canaries.py), which honest work fails as the reference does. Work that earns more than the
reference there has forged its reward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import math
import posixpath
import random
import sys
import time
from collections.abc import Mapping

from rl_code.environment.sandbox.pool import File, Sandbox, SandboxPool, Snapshot
from rl_code.environment.suites.again import CANARY_PASSED
from rl_code.environment.suites.applied import Base, applied, deleted, solved
from rl_code.environment.suites.canaries import draw_alone, functions_in, guarded
from rl_code.types import Script, Task

REWARD = "reward"
TESTS = "/tests"
LOGS = "/logs/verifier"
_TEXT, _JSON = "reward.txt", "reward.json"
# Characters of a file with a reward, and values in it.
_LONGEST = 1 << 14
_MOST_VALUES = 64
# Runs with changed tests. One alone would pay work that forges at random.
_CHANGED = 2
# Characters that are quoted of what the program printed.
_SAID = 300
_NO_TIME = "there was no time to look whether its reward is forged"
_FORGED = "its reward is the same where its tests ask for something else"


class NoReward(ValueError):
    """Error: what a program left behind is no reward; the message says why."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """Result of grading with a program."""

    # By name, "reward" among them.
    rewards: Mapping[str, float]
    # "" for a reward of 1 or more, else why it is less.
    error: str
    # "canary_passed" proves cheating; "timeout" and "killed" say how a run ended.
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Result of one run. error: why there is no reward, "" if there is one."""

    rewards: Mapping[str, float]
    error: str
    flags: frozenset[str]
    said: str

    @property
    def reward(self) -> float:
        return self.rewards[REWARD]


def grade_script(
    task: Task, script: Script, work: Snapshot, pool: SandboxPool, timeout_s: float
) -> Judged:
    """Runs a program on work: all files, or in a world the difference from it.

    timeout_s: for all runs together; each may take ``script.timeout_s``. Raises SandboxFault.
    """
    with contextlib.closing(Base(task, pool)) as base:
        return _Grading(task, script, pool, base, timeout_s).grade(work)


def script_guarded(task: Task, script: Script) -> bool:
    """True if a forged reward would show: the tests of the program have values that can be changed,
    and a reference says what is earned then.
    """
    texts, ids = _tests(script)
    return bool((task.reference or deleted(task)) and guarded(texts, ids))


def nothing_of(rewards: Mapping[str, float]) -> dict[str, float]:
    """Rewards of work that cheats: none is above 0."""
    return {name: min(value, 0.0) for name, value in rewards.items()}


class _Grading:
    """One grading by one program."""

    def __init__(self, task: Task, script: Script, pool: SandboxPool, base: Base, timeout_s: float):
        self._task = task
        self._script = script
        self._pool = pool
        self._base = base
        self._deadline = time.monotonic() + timeout_s
        # Nobody else can foresee what is drawn.
        self._rng = random.SystemRandom()

    def grade(self, work: Snapshot) -> Judged:
        files = self._applied(work)
        first = self._run(files, self._script.files)
        if first.error:
            return Judged({REWARD: 0.0}, first.error, tuple(sorted(first.flags)))
        least, flags = first, set(first.flags)
        if first.reward > 0 and script_guarded(self._task, self._script):
            again = self._run(files, self._script.files)
            flags |= again.flags
            if again.error:
                return Judged({REWARD: 0.0}, again.error, tuple(sorted(flags)))
            least = min(first, again, key=lambda run: run.reward)
            if problem := self._forged(files, flags):
                return Judged(nothing_of(least.rewards), problem, tuple(sorted(flags)))
        error = "" if least.reward >= 1 else f"its reward is {least.reward:g}: {least.said}"
        return Judged(least.rewards, error, tuple(sorted(flags)))

    def _forged(self, files: Snapshot, flags: set[str]) -> str:
        """Reason not to pay work whose reward may be forged; "" for none. Adds to ``flags``."""
        texts, ids = _tests(self._script)
        for _ in range(_CHANGED):
            if time.monotonic() >= self._deadline:
                return _NO_TIME
            drawn = draw_alone(texts, ids, self._rng, ids)
            changed = {path: text.encode() for path, text in drawn.files.items()}
            tests = {**self._script.files, **changed}
            run = self._run(files, tests)
            if run.reward <= 0:
                continue
            known = self._run(self._applied(solved(self._task)), tests)
            if run.reward > known.reward + 1e-9:
                flags.add(CANARY_PASSED)
                return _FORGED
        return "" if time.monotonic() < self._deadline else _NO_TIME

    def _applied(self, work: Snapshot) -> dict[str, str | File]:
        """The part of work that is the agent's to change: all that tests nothing, and what the
        reference changes.
        """
        own = {*self._task.reference, *deleted(self._task)}
        kept = applied(self._task, None, work, self._base, own)
        return {path: entry for path, entry in kept.items() if not self._leads_out(path, entry)}

    def _leads_out(self, path: str, entry: str | File) -> bool:
        """True for a link to where tests and rewards are."""
        if isinstance(entry, str) or entry.kind != "link":
            return False
        workspace = self._task.world.workspace if self._task.world else "/"
        target = entry.content.decode(errors="replace")
        full = posixpath.normpath(posixpath.join(workspace, posixpath.dirname(path), target))
        return full == "/" or f"{full}/".startswith((f"{TESTS}/", "/logs/"))

    def _run(self, files: Snapshot, tests: Mapping[str, bytes]) -> _Run:
        """A run in a sandbox of its own; another one where that is lost, by the machine's doing or
        the candidate's. Code that brings its sandbox down does so again.
        """
        run, lost = self._try_run(files, tests)
        return self._try_run(files, tests)[0] if lost else run

    def _try_run(self, files: Snapshot, tests: Mapping[str, bytes]) -> tuple[_Run, bool]:
        """One run, and True if its sandbox was lost."""
        script = self._script
        gone = File(b"", kind="deleted")
        places = {
            TESTS: entries_of(script, tests),
            LOGS: {_TEXT: gone, _JSON: gone},  # an image may hold some
        }
        try:
            sandbox = self._pool.open(files, self._task.world, places)
        except ValueError as error:  # files made to fit no other workspace
            return _Run({REWARD: 0.0}, str(error), frozenset(), ""), False
        with sandbox:
            left_s = min(self._deadline - time.monotonic(), script.timeout_s)
            if left_s <= 0:
                return _Run({REWARD: 0.0}, "not run: no time was left", frozenset(), ""), False
            done = run_program(sandbox, f"{TESTS}/{script.program}", script.environment, left_s)
            said = " ".join(done.stdout.split())[-_SAID:] or "it said nothing"
            flags = frozenset(
                ["timeout"] if done.timed_out else ["killed"] if done.exceeded else []
            )
            try:
                if done.timed_out:  # Harbor reads no reward then
                    raise NoReward(f"it took more than {left_s:.1f} s")
                return _Run(reward_in(sandbox), "", flags, said), sandbox.lost
            except NoReward as error:
                why = f"{script.program}: {error}; it ended with {done.exit_code}: {said}"
                return _Run({REWARD: 0.0}, why, flags, said), sandbox.lost


def entries_of(script: Script, files: Mapping[str, bytes]) -> dict[str, File]:
    """The files of a program, perhaps with other content, with their rights."""
    runs = (script.program, *script.executable)
    return {
        path: File(content, 0o755 if path in runs else 0o644) for path, content in files.items()
    }


def run_program(sandbox: Sandbox, path: str, environment: Mapping[str, str], timeout_s: float):
    """Runs a program of the task in the workspace, as Harbor does: by its first line, or by bash
    where it has none that names an interpreter.
    """
    settings = [f"{name}={value}" for name, value in environment.items()]
    return sandbox.run(["env", *settings, "bash", "-c", '"$0"', path], timeout_s=timeout_s)


def reward_in(sandbox: Sandbox) -> dict[str, float]:
    """The rewards that a program has left. Raises NoReward."""
    for name, read in ((_JSON, json_rewards), (_TEXT, text_reward)):
        try:
            return read(sandbox.read_file(name, LOGS))
        except FileNotFoundError:
            continue
        except NoReward:
            raise
        except (OSError, ValueError) as error:
            raise NoReward(f"{LOGS}/{name} cannot be read: {error}") from error
    raise NoReward(f"it wrote neither {LOGS}/{_JSON} nor {_TEXT}")


def text_reward(text: str) -> dict[str, float]:
    """The reward in reward.txt. Raises NoReward."""
    if not text:
        raise NoReward(f"{_TEXT} is empty")
    try:
        value = float(text) if len(text) <= _LONGEST else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise NoReward(f"{_TEXT} holds {text[:40]!r} instead of a finite number")
    return {REWARD: value}


def json_rewards(text: str) -> dict[str, float]:
    """The rewards in reward.json, by name. One without the name "reward" has the mean of the others
    as it. Raises NoReward.
    """
    if not text or len(text) > _LONGEST:
        raise NoReward(f"{_JSON} has {len(text)} characters; 1 to {_LONGEST} are read")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"{_JSON} is no JSON") from error
    if not isinstance(found, dict) or not 0 < len(found) <= _MOST_VALUES:
        raise NoReward(f"{_JSON} must be an object with 1 to {_MOST_VALUES} rewards")
    for name, value in found.items():
        # JSON may hold an integer that is greater than any float
        finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        if not finite:
            raise NoReward(f"{_JSON} holds {str(value)[:40]!r} as {name[:40]!r}, no finite number")
    rewards = {name: float(value) for name, value in found.items()}
    return {REWARD: sum(rewards.values()) / len(rewards), **rewards}


def _tests(script: Script) -> tuple[dict[str, str], list[str]]:
    """Files of the program that pytest runs, path -> text, and the ids of tests in them."""
    texts = {}
    for path, content in script.files.items():
        name = posixpath.basename(path)
        if fnmatch.fnmatch(name, "test_*.py") or fnmatch.fnmatch(name, "*_test.py"):
            with contextlib.suppress(UnicodeDecodeError):
                texts[path] = content.decode()
    return texts, [one for path, text in texts.items() for one in functions_in(path, text)]
