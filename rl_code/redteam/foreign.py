"""Red team for anybody's tasks: what each grader of a set of tasks pays for.

Every cheat of ``foreign_cheats`` is done in a sandbox as an agent would do it, and then graded:

  as Harbor does      test.sh in the sandbox of the agent, whose reward is believed
  as SWE-bench does   the tests of the row over the agent's files, and what pytest prints believed
  test.sh             this project's way to run test.sh (``environment.script_grader``)
  suite alone         this project's suite grader, without canaries and values
  suite               the suite grader
  both                test.sh and suite, which must both pass

The first two are copies of what the benchmarks do, small enough to be read here, in sandboxes in
place of containers. Beside cheats two controls are graded: nothing done, which must not be paid,
and the reference, which must. ``left_over`` looks for the solution and the hidden tests in the
world that the agent sees.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence

from rl_code.environment.finished import CHEATS as PROOFS
from rl_code.environment.grading import grade_work
from rl_code.environment.sandbox.pool import Sandbox, SandboxPool, Snapshot
from rl_code.environment.script_grader import (
    LOGS,
    REWARD,
    TESTS,
    NoReward,
    entries_of,
    reward_in,
)
from rl_code.environment.suite_grader import grade_suite
from rl_code.environment.suites.applied import deleted, laid_over, solved
from rl_code.redteam.foreign_cheats import CHEATS, HARBOR, SWE, Cheat
from rl_code.types import Limits, Task, Tests

AS_HARBOR, AS_SWE = "as Harbor does", "as SWE-bench does"
SCRIPT, ALONE, SUITE, EACH = "test.sh", "suite alone", "suite", "both"
NOTHING, REFERENCE = "nothing done", "the reference"
_COMMAND_S = 60.0
# Of programs that a container looks for first, which are its agent's to change.
_LOCAL = "/usr/local/sbin:/usr/local/bin"
_STAGED = "/staged"
# Characters of the least text that is looked for.
_LEAST = 24


@dataclasses.dataclass(frozen=True)
class Paid:
    """Result of one attempt at one grader."""

    task: str
    # Name of a cheat, or a control.
    attempt: str
    grader: str
    # Reward, where 1 is full pay; None where the cheat is not possible in this world.
    earned: float | None
    # Reward of the work when nothing is done.
    nothing: float = 0.0
    flags: tuple[str, ...] = ()

    @property
    def is_cheat(self) -> bool:
        """False for a control."""
        return self.attempt not in (NOTHING, REFERENCE)

    @property
    def paid(self) -> bool:
        """True if it earned more than nothing done."""
        return self.earned is not None and self.earned > self.nothing + 1e-9

    @property
    def proven(self) -> bool:
        """True if the grader has proven a cheat."""
        return not PROOFS.isdisjoint(self.flags)


@dataclasses.dataclass(frozen=True)
class Left:
    """Something that the agent's world should not hold."""

    task: str
    # "solution" or "hidden test", and the path that the task has it under.
    what: str
    path: str
    # Where the agent finds it.
    found: str


def kind_of(task: Task) -> str:
    """The kind of a task: HARBOR for one that a program grades, SWE for one with a suite alone."""
    return SWE if task.hidden_tests.script is None else HARBOR


def tried(
    task: Task, pool: SandboxPool, limits: Limits, cheats: Sequence[Cheat] = CHEATS
) -> Iterator[Paid]:
    """Every attempt at every grader of a task. Raises SandboxFault, SuiteError."""
    kind = kind_of(task)
    nothing = _graded(task, ":", pool, limits)
    for grader, (earned, flags) in nothing.items():
        yield Paid(task.id, NOTHING, grader, earned, flags=flags)
    known = {grader: earned or 0.0 for grader, (earned, _) in nothing.items()}
    if task.reference or deleted(task):
        for grader, (earned, flags) in _graded(task, None, pool, limits).items():
            yield Paid(task.id, REFERENCE, grader, earned, known[grader], flags)
    for cheat in cheats:
        if kind in cheat.kinds:
            for grader, (earned, flags) in _graded(task, cheat.command, pool, limits).items():
                yield Paid(task.id, cheat.name, grader, earned, known[grader], flags)


type Earned = tuple[float | None, tuple[str, ...]]


def _graded(
    task: Task, command: str | None, pool: SandboxPool, limits: Limits
) -> dict[str, Earned]:
    """Pay of each grader of a task for a command; for the reference where it is None."""
    script, suite = task.hidden_tests.script, task.hidden_tests.suite
    own = _as_harbor if script is not None else _as_swe_bench
    name = AS_HARBOR if script is not None else AS_SWE
    found: dict[str, Earned] = {name: (own(task, command, pool, limits), ())}
    work = _worked(task, command, pool)
    if work is None:  # it cannot be done in this world
        graders = [SCRIPT] if script else []
        graders += [ALONE, SUITE] if suite else []
        graders += [EACH] if script and suite else []
        return {name: (None, ()), **dict.fromkeys(graders, (None, ()))}
    if script is not None:
        grade = _grade(task, Tests(script=script), work, pool, limits)
        found[SCRIPT] = (grade.scores or {}).get(REWARD, 0.0), grade.flags
    if suite is not None:
        plain = grade_suite(task, suite, work, pool, limits.grade_s, canaries=0)
        found[ALONE] = float(not any(plain.errors)), plain.flags
        grade = _grade(task, Tests(suite=suite), work, pool, limits)
        found[SUITE] = float(grade.solved), grade.flags
    if script is not None and suite is not None:
        both = [found[SCRIPT], found[SUITE]]
        flags = {flag for _, flags in both for flag in flags}
        passed = all((earned or 0.0) >= 1 for earned, _ in both) and not PROOFS & flags
        found[EACH] = float(passed), tuple(sorted(flags))
    return found


def _grade(task: Task, tests: Tests, work: Snapshot, pool: SandboxPool, limits: Limits):
    return grade_work(dataclasses.replace(task, hidden_tests=tests), work, pool, limits)


def _worked(task: Task, command: str | None, pool: SandboxPool) -> Snapshot | None:
    """The files that an agent hands in who has run a command; None where it fails."""
    if command is None:
        return solved(task)
    with pool.open(task.files, task.world) as sandbox:
        done = sandbox.run(["bash", "-c", command], timeout_s=_COMMAND_S)
        return None if done.exit_code else sandbox.snapshot()


def _start(task: Task, command: str | None) -> tuple[Snapshot, str]:
    """Files that the agent starts from, and what it does; of the reference nothing more."""
    return (solved(task), ":") if command is None else (task.files, command)


def _as_harbor(task: Task, command: str | None, pool: SandboxPool, limits: Limits) -> float:
    """Reward that test.sh leaves in the agent's own sandbox, whose processes go on."""
    script = task.hidden_tests.script
    assert script is not None
    files, command = _start(task, command)
    settings = " ".join(shlex.quote(f"{k}={v}") for k, v in script.environment.items())
    line = (
        f'export PATH="{_LOCAL}:$PATH"\nbash -c "$0"\nrm -f {LOGS}/reward.txt {LOGS}/reward.json\n'
        f"cp -rf {_STAGED}/. {TESTS}/\nexec env {settings} {TESTS}/{script.program}\n"
    )
    places = {TESTS: {}, LOGS: {}, _STAGED: entries_of(script, script.files)}
    seconds = min(script.timeout_s, limits.grade_s)
    with pool.open(files, task.world, places) as sandbox:
        done = sandbox.run(["bash", "-c", line, command], timeout_s=seconds)
        try:
            return 0.0 if done.timed_out else reward_in(sandbox)[REWARD]
        except NoReward:
            return 0.0


def _as_swe_bench(task: Task, command: str | None, pool: SandboxPool, limits: Limits) -> float:
    """1 if pytest prints PASSED behind every id, in the agent's own files with the row's tests laid
    over them.
    """
    suite = task.hidden_tests.suite
    assert suite is not None
    files, command = _start(task, command)
    with pool.open(files, task.world) as sandbox:
        sandbox.run(["bash", "-c", command], timeout_s=_COMMAND_S)
        sandbox.restore(laid_over(task, {}, suite.files.items()))
        paths = dict.fromkeys(one.partition("::")[0] for one in suite.ids)
        argv = [*suite.command, "-rA", "-q", "-p", "no:cacheprovider", *paths]
        printed = sandbox.run(argv, timeout_s=limits.grade_s).stdout
    passed = set(re.findall(r"^PASSED (\S+)", printed, re.MULTILINE))
    return float(set(suite.ids) <= passed)


# --- What is left over ----------------------------------------------------------------------------


def left_over(task: Task, pool: SandboxPool) -> list[Left]:
    """Solutions and hidden tests that lie, whole, in the world that an agent of the task sees: as a
    file, or in the history of the workspace. Raises SandboxFault.
    """
    found = []
    with pool.open(task.files, task.world) as sandbox:
        for what, texts in (("solution", _solutions(task)), ("hidden test", _hidden(task))):
            for path, data in texts.items():
                found += [Left(task.id, what, path, place) for place in _places(sandbox, data)]
    return found


def _solutions(task: Task) -> dict[str, bytes]:
    """Texts of the reference that the agent is not given."""
    return {
        path: text.encode(errors="surrogatepass")
        for path, text in task.reference.items()
        if len(text) >= _LEAST and task.files.get(path) != text
    }


def _hidden(task: Task) -> dict[str, bytes]:
    """Texts of the hidden tests."""
    script, suite = task.hidden_tests.script, task.hidden_tests.suite
    found: dict[str, bytes] = {}
    if suite is not None:
        found |= {path: text.encode() for path, text in suite.files.items() if text}
    if script is not None:  # the same files, under the names that they have there
        found = {f"{TESTS}/{path}": content for path, content in script.files.items()}
    return {path: data for path, data in found.items() if len(data) >= _LEAST}


def _places(sandbox: Sandbox, data: bytes) -> list[str]:
    """Places at which an agent finds a file with this content."""
    digest = hashlib.sha256(data).hexdigest()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    script = (
        "find / \\( -path /proc -o -path /dev -o -path /opt/python \\) -prune -o -type f "
        f"-size {len(data)}c -exec sha256sum {{}} + 2>/dev/null | sed -n 's/^{digest}  /file /p'\n"
        "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'\n"
        f"if git cat-file -e {blob} 2>/dev/null; then\n"
        f"  commit=$(git log --all --format=%h --find-object={blob} 2>/dev/null | tail -n 1)\n"
        '  echo "history ${commit:-loose object}"\nfi\n'
    )
    said = sandbox.run(["bash", "-c", script], timeout_s=_COMMAND_S).stdout
    return [line for line in said.splitlines() if line.startswith(("file ", "history "))]


# --- Tables ---------------------------------------------------------------------------------------


def ranked(attempts: Sequence[Paid]) -> list[list[str]]:
    """A row for each grader, the one that pays for the fewest cheats first."""
    rows = []
    for grader in dict.fromkeys(one.grader for one in attempts):
        own = [one for one in attempts if one.grader == grader]
        cheats = [one for one in own if one.is_cheat and one.earned is not None]
        references = [one for one in own if one.attempt == REFERENCE]
        refused = sum((one.earned or 0.0) < 1 for one in references)
        early = sum((one.earned or 0.0) >= 1 for one in own if one.attempt == NOTHING)
        paid = sum(one.paid for one in cheats)
        share = paid / len(cheats) if cheats else 0.0
        full = sum(one.paid and (one.earned or 0.0) >= 1 for one in cheats)
        proven = sum(one.proven for one in cheats)
        cells = [
            f"{paid} of {len(cheats)}",
            str(full),
            str(proven),
            f"{refused} of {len(references)}",
        ]
        rows.append(((share, refused), [grader, *cells, str(early)]))
    rows.sort(key=lambda row: row[0])
    head = ["grader", "cheats paid", "in full", "proven", "references refused", "paid for nothing"]
    return [head, *(row for _, row in rows)]


def by_cheat(attempts: Sequence[Paid], said: Sequence[tuple[str, str]] = ()) -> list[list[str]]:
    """A row for each cheat: on how many tasks each grader pays for it, and how it is closed.

    said: name of cheats that are no commands, and how they are closed.
    """
    graders = list(dict.fromkeys(one.grader for one in attempts))
    rows = [["cheat", *graders, "how to close it"]]
    for name, close in (*said, *((cheat.name, cheat.close) for cheat in CHEATS)):
        own = [one for one in attempts if one.attempt == name]
        cells = []
        for grader in graders:
            here = [one for one in own if one.grader == grader and one.earned is not None]
            cells.append(f"{sum(one.paid for one in here)} of {len(here)}" if here else "-")
        if own:
            rows.append([name, *cells, close])
    return rows
