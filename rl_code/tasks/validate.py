"""Validation of tasks: their tests fail before the work and pass with the reference, each time.

A verdict has a reason, which many tasks share, and a detail of its own.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table
import rich.text

from rl_code.environment.finished import Grade
from rl_code.environment.grading import grade_in_words
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.suite_grader import SuiteError, passes
from rl_code.environment.suites.applied import deleted, solved
from rl_code.environment.tools.text import one_line
from rl_code.host.files import write_atomically
from rl_code.store.serialization import dumps
from rl_code.tasks.guards import Guards, guards_of, some
from rl_code.tasks.source import FAULT, NoTask, Refusal
from rl_code.types import Limits, Task, Tests

# Reasons.
NOT_BUILT = NoTask.reason
NO_TESTS = "has no tests"
NO_REFERENCE = "has no reference"
PASSES_BEFORE = "passes before the work"
BROKEN_BEFORE = "a test that should pass before the work fails"
REFERENCE_FAILS = "fails with its reference"
DIFFERS = "does not end the same each time"
NOT_GRADED = "cannot be graded"
GRADERS_DIFFER = "its two graders differ"
FORGEABLE = "can be forged"
# Of a file of verdicts; one that another revision wrote is made anew.
REVISION = 4
_SHOWN_IDS = 5
_SHOWN_CHARACTERS = 300


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of the validation of one task."""

    id: str
    # One of the above, or that of a ``source.NoTask``; "" for a task that works.
    reason: str
    # The fault of this task.
    detail: str = ""
    # Wall-clock time.
    seconds: float = 0.0
    # Digest of all that the verdict depends on.
    digest: str = ""
    # Reason why results could be forged without a guess; "" for a task where that is not so
    # (``guards``).
    forgeable: str = ""
    # Hidden tests that must fail before the work, and how many of them are guarded.
    required: int = 0
    guarded: int = 0


def judge(task: Task, pool: SandboxPool, limits: Limits, runs: int) -> Verdict:
    """The verdict on one task, whose tests run ``runs`` times before the work and with the
    reference.
    """
    start = time.monotonic()
    guards = Guards()
    try:
        reason, detail = _judge(task, pool, limits, runs)
        guards = Guards() if reason else guards_of(task, pool)
    except SandboxFault as fault:
        reason, detail = FAULT, str(fault)
    except SuiteError as error:
        reason, detail = NOT_GRADED, str(error)
    except Exception as error:  # a task may hold anything: each has a verdict of its own
        reason, detail = NOT_GRADED, f"{type(error).__name__}: {error}"[:300]
    seconds = time.monotonic() - start
    digest = digest_of(task, limits, runs)
    found = (guards.problem, guards.required, guards.guarded)
    return Verdict(task.id, reason, detail, seconds, digest, *found)


def refusing(verdict: Verdict, *, forgeable: bool) -> Verdict:
    """A verdict that calls a task that can be forged one that does not work, or one that does."""
    if verdict.forgeable and forgeable:
        return dataclasses.replace(verdict, reason=FORGEABLE, detail=verdict.forgeable)
    if verdict.reason == FORGEABLE:
        return dataclasses.replace(verdict, reason="", detail="")
    return verdict


def digest_of(task: Task, limits: Limits, runs: int) -> str:
    """Digest of all that a verdict on a task depends on, the code of this project left out; "" for
    a task that cannot be written down, as one with a lone surrogate in a text.
    """
    try:
        parts = dumps((REVISION, task, limits.command_s, limits.grade_s, runs))
    except Exception:  # whose verdict says so
        return ""
    return hashlib.sha256(parts).hexdigest()


def _judge(task: Task, pool: SandboxPool, limits: Limits, runs: int) -> tuple[str, str]:
    """Reason and detail."""
    names = [*names_of(task.visible_tests, "visible "), *names_of(task.hidden_tests)]
    if not names:
        return NO_TESTS, ""
    if not task.reference and not deleted(task):
        return NO_REFERENCE, ""
    for state, files, check in (
        ("before the work", task.files, _before),
        ("with its reference", solved(task), _after),
    ):
        graded = [grade_in_words(task, files, pool, limits) for _ in range(runs)]
        grades = [grade for grade, _ in graded]
        for grade in grades:
            if grade.cause:
                return NOT_GRADED, grade.cause
        first = _passed(grades[0])
        for grade in grades[1:]:
            if _passed(grade) != first:
                pairs = zip(names, first, _passed(grade), strict=True)
                return DIFFERS, some([name for name, one, other in pairs if one != other])
        errors = dict(zip(names, graded[0][1], strict=True))
        if found := _differing(task, errors):
            return GRADERS_DIFFER, f"{state} {found}"
        if found := check(task, errors, grades[0]):
            return found
    return "", ""


def _before(task: Task, errors: Mapping[str, str], grade: Grade) -> tuple[str, str] | None:
    """Reason and detail of the fault that tests show in a task's files as the agent gets them; None
    for no fault.

    errors: name of each test -> "" or why it did not pass.
    """
    if not any(errors.values()):
        return PASSES_BEFORE, "all tests"
    suite, script = task.hidden_tests.suite, task.hidden_tests.script
    if script is not None and not errors[script.program]:
        return PASSES_BEFORE, script.program
    if suite is None:
        return None
    if early := [id for id in suite.fail_to_pass if passes(errors[id])]:
        return PASSES_BEFORE, some(early)
    if broken := [id for id in suite.pass_to_pass if errors[id]]:
        return BROKEN_BEFORE, f"{some(broken)}: {one_line(errors[broken[0]], _SHOWN_CHARACTERS)}"
    return None


def _differing(task: Task, errors: Mapping[str, str]) -> str:
    """Verdicts of a task's two graders where one passes what the other one fails; "" where they
    agree, and for a task with one grader. ``errors`` as above.
    """
    suite, script = task.hidden_tests.suite, task.hidden_tests.script
    if suite is None or script is None:
        return ""
    failed = [id for id in suite.ids if not passes(errors[id])]
    why = errors[script.program]
    if bool(failed) == bool(why):
        return ""
    if failed:
        return f"{script.program} pays, and the suite fails {some(failed)}"
    return f"the suite passes, and {script.program} fails: {one_line(why, _SHOWN_CHARACTERS)}"


def _after(task: Task, errors: Mapping[str, str], grade: Grade) -> tuple[str, str] | None:
    """Reason and detail of the fault that tests show in the reference; ``errors`` as above."""
    if grade.solved:
        return None
    failed = [name for name, error in errors.items() if error]
    flags = f" ({', '.join(grade.flags)})" if grade.flags else ""
    why = f": {one_line(errors[failed[0]], _SHOWN_CHARACTERS)}" if failed else ""
    return REFERENCE_FAILS, f"{some(failed)}{flags}{why}"


def names_of(tests: Tests, kind: str = "") -> list[str]:
    """A name for each test, in the order in which they are graded."""
    cases = [f"{kind}case {i}" for i in range(1, len(tests.cases) + 1)]
    code = [f"{kind}statement {i}" for i in range(1, len(tests.code) + 1)]
    ids = () if tests.suite is None else tests.suite.ids
    script = () if tests.script is None else (tests.script.program,)
    return [*cases, *code, *(f"{kind}{id}" for id in (*ids, *script))]


def _passed(grade: Grade) -> tuple[bool, ...]:
    return grade.visible + grade.hidden


# --- Many tasks -----------------------------------------------------------------------------------


def judge_all(
    tasks: Iterable[tuple[str, Task | Refusal]],
    pool: SandboxPool,
    limits: Limits,
    runs: int,
    workers: int,
    known: Mapping[str, Verdict],
    on_verdict: Callable[[Verdict], None],
) -> None:
    """Judges tasks, ``workers`` at a time; calls ``on_verdict``, in this thread, with each verdict
    as it comes.

    tasks: what ``Source.load_each`` gives. known: earlier verdicts by id; one on the same task
    stands, unless the sandbox had failed.
    """
    with concurrent.futures.ThreadPoolExecutor(workers) as executor:
        waiting: set[concurrent.futures.Future[Verdict]] = set()
        try:
            for id, task in tasks:
                if isinstance(task, Refusal):
                    on_verdict(Verdict(id, task.reason, str(task)))
                    continue
                before = known.get(id)
                if before and before.digest and before.digest == digest_of(task, limits, runs):
                    if before.reason != FAULT:
                        on_verdict(before)
                        continue
                waiting.add(executor.submit(judge, task, pool, limits, runs))
                # worlds are built here meanwhile, but not many more than are judged
                while len(waiting) >= 2 * workers:
                    waiting = _take(waiting, on_verdict)
            while waiting:
                waiting = _take(waiting, on_verdict)
        except BaseException:
            for future in waiting:
                future.cancel()
            # what has begun ends within its time, and is kept
            for future in waiting:
                if not future.cancelled():
                    on_verdict(future.result())
            raise


def _take(
    waiting: set[concurrent.futures.Future[Verdict]], on_verdict: Callable[[Verdict], None]
) -> set[concurrent.futures.Future[Verdict]]:
    """Waits for at least one verdict; what is left to wait for."""
    first = concurrent.futures.FIRST_COMPLETED
    done, left = concurrent.futures.wait(waiting, return_when=first)
    for future in done:
        on_verdict(future.result())
    return left


def save(path: Path, source: str, verdicts: Sequence[Verdict], *, finished: bool) -> None:
    """Writes verdicts as JSON: "source", "finished", "works" (ids), "verdicts" (by id)."""
    fields = {
        "source": source,
        "revision": REVISION,
        "finished": finished,
        "works": [verdict.id for verdict in verdicts if not verdict.reason],
        "verdicts": {one.id: dataclasses.asdict(one) for one in verdicts},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(fields, indent=1) + "\n").encode())


def load(path: Path) -> dict[str, Verdict]:
    """The verdicts of a file that ``save`` wrote, by id; none where there is no file. Raises
    ValueError for another one.
    """
    if not path.exists():
        return {}
    try:
        fields: Mapping[str, Any] = json.loads(path.read_text())
        if fields["revision"] != REVISION:
            return {}
        return {id: Verdict(**one) for id, one in fields["verdicts"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} holds no verdicts on tasks: {error}; delete it") from error


def table(title: str, verdicts: Sequence[Verdict]) -> rich.table.Table:
    """Table of the number of tasks that work, and of the others by reason."""
    view = rich.table.Table(title=title, title_justify="left", caption_justify="left")
    view.add_column("tasks", justify="right")
    view.add_column("share", justify="right")
    view.add_column("")
    view.add_column("which, and why", overflow="fold")
    groups: dict[str, list[Verdict]] = collections.defaultdict(list)
    for verdict in verdicts:
        groups[verdict.reason].append(verdict)
    rows = [("", groups.pop("", []))]
    rows += sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    for reason, found in rows:
        share = f"{100 * len(found) / len(verdicts):.1f} %" if verdicts else "-"
        shown = [f"{one.id}: {one.detail}" if one.detail else one.id for one in found[:_SHOWN_IDS]]
        if len(found) > _SHOWN_IDS:
            shown.append(f"and {len(found) - _SHOWN_IDS} more")
        words = "\n".join(shown) if reason else ""
        view.add_row(str(len(found)), share, reason or "work", rich.text.Text(words))
    seconds = sum(verdict.seconds for verdict in verdicts)
    each = f", {seconds / len(verdicts):.2f} s each" if verdicts else ""
    view.caption = f"{len(verdicts)} tasks{each}"
    working = [verdict for verdict in verdicts if not verdict.reason]
    if required := sum(verdict.required for verdict in working):
        guarded = sum(verdict.guarded for verdict in working)
        least = [one for one in working if one.guarded < one.required]
        least.sort(key=lambda one: one.guarded / one.required)
        shown = ", ".join(f"{one.id} {one.guarded}/{one.required}" for one in least[:_SHOWN_IDS])
        view.caption += (
            f"\n{guarded} of the {required} hidden tests that must fail before the work are "
            f"guarded ({100 * guarded / required:.1f} %): only the right value passes them"
            + (f". Fewest: {shown}" if least else "")
        )
    forgeable = [verdict for verdict in working if verdict.forgeable]
    if forgeable:
        shown = "\n".join(f"{one.id}: {one.forgeable}" for one in forgeable[:_SHOWN_IDS])
        more = len(forgeable) - _SHOWN_IDS
        view.caption += (
            f"\n{len(forgeable)} of those that work can be forged (--refuse_forgeable leaves them "
            f"out):\n{shown}{f' and {more} more' if more > 0 else ''}"
        )
    return view
