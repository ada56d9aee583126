"""Tries ways to cheat and to escape, and says what each of them came to.

A cheat may earn at most what an honest failure earns: the work that the agent was given, handed in
as it is, or the cheat's own work without the forgery. An escape may do no harm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rl_code.config import read_config
from rl_code.environment.finished import FinishedEpisode, Grade, Usage
from rl_code.environment.grading import grade_work
from rl_code.environment.sandbox.pool import File, SandboxPool
from rl_code.environment.suite_grader import grade_suite
from rl_code.environment.suites.again import CANARY_PASSED
from rl_code.redteam.cheats import CHEATS
from rl_code.redteam.episodes import SCRIPTS, SIGNALS, SUBMIT, Player, of_files
from rl_code.redteam.escapes import ESCAPES, Host, attempt
from rl_code.redteam.files import FILES
from rl_code.redteam.forgers import GUESSED_ROWS, OPEN
from rl_code.redteam.ground import FIXTURE_ROWS, GRADERS, GROUNDS, LIMITS, Attack, task
from rl_code.rewards.combine import RewardConfig, combine, find_signals
from rl_code.types import Task, World

# Where cheats are tried: each grader by itself, and an episode with the tests of one.
ALONE = "suite alone"
EPISODES = ("episode, cases", "episode, suite")
# How often an attack that guesses is tried again while it has guessed wrong in every test, which
# happens once in 2 ** canaries times.
_GUESSES = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one attempt."""

    # "solution", "files", "script", "escape" or "honest"; "open" for what is known to be paid.
    kind: str
    name: str
    # The side attacked: one of GRADERS, one of EPISODES, "sandbox" for escapes.
    against: str
    # Reward of the attempt, and reward of an honest failure; None for escapes and references. ALONE
    # pays nobody: there it is the reward that would have been paid.
    earned: float | None = None
    failure: float | None = None
    flags: tuple[str, ...] = ()
    # Harm that an escape has done, and anything else that is wrong.
    harm: tuple[str, ...] = ()

    @property
    def proven_by_canary(self) -> bool:
        """True if a canary has shown that results were forged."""
        return CANARY_PASSED in self.flags

    @property
    def held(self) -> bool:
        """True if it was paid no more than an honest failure and did no harm. Always true of kind
        "open".
        """
        if self.kind == "open":
            return True
        paid_more = self.failure is not None and self.earned > self.failure + 1e-9
        return not paid_more and not self.harm


def earned(task: Task, grade: Grade) -> float:
    """The reward of a grade, by the signals of ``episodes.SIGNALS`` that are about tests."""
    section = {"signals": [one for one in SIGNALS if "malformed" not in str(one)]}
    usage = Usage(0, 0, 0, {}, 0, {})
    finished = FinishedEpisode(task, None, {}, {}, grade, usage)
    return combine(finished, find_signals(read_config.build(RewardConfig, section))).total


def work_of(task: Task, files: Mapping[str, str | bytes | None]) -> dict[str, str | File]:
    """The task's files with changes, as a snapshot that is graded."""
    work: dict[str, str | File] = dict(task.files)
    for path, entry in files.items():
        if isinstance(entry, bytes):
            work[path] = File(entry, kind="link")
        elif entry is not None:
            work[path] = entry
        elif task.world is None:
            work.pop(path, None)
        else:
            work[path] = File(b"", kind="deleted")
    return work


class Trial:
    """Tries attacks in the sandboxes of one pool. world: one with pytest in it."""

    def __init__(self, pool: SandboxPool, world: World):
        self._pool = pool
        grounds = (*GRADERS, *GROUNDS)
        self._tasks = {ground: task(ground, world) for ground in grounds}
        self._player = Player(pool)
        self._failures: dict[tuple[str, ...], float] = {}

    def cheats(self, attacks: Sequence[Attack] = (*CHEATS, *FILES)) -> Iterator[Outcome]:
        """Each attack against each grader that it says something to."""
        for attack in attacks:
            usual = () if attack.only_also else ("suite",) if attack.only_suite else GRADERS
            for grader in (*usual, *attack.also):
                yield self.against_grader(attack, grader)

    def open(self, times: int = 3) -> Iterator[Outcome]:
        """Attacks that are paid, always or when they guess right, each on the suite that it is made
        for, several times.
        """
        for attack, ground in (*OPEN, *((guess, FIXTURE_ROWS) for guess in GUESSED_ROWS)):
            for _ in range(times):
                outcome = self._graded(self._tasks[ground], attack, ground)
                yield dataclasses.replace(outcome, kind="open")

    def episodes(
        self, attacks: Sequence[Attack] = (*CHEATS[::6], *FILES[::6])
    ) -> Iterator[Outcome]:
        """Scripts, and some attacks, through whole episodes."""
        for where in EPISODES:
            for script in SCRIPTS:
                yield self.in_episode("script", script.name, script.messages, where)
            for attack in attacks:
                if attack.only_also or (attack.only_suite and "suite" not in where):
                    continue
                kind = "files" if attack.only_suite else "solution"
                yield self.in_episode(kind, attack.name, of_files(attack.files), where)

    def escapes(self, host: Host, names: Sequence[str] = ()) -> Iterator[Outcome]:
        """Ways out of the sandbox; those of these names, () for all."""
        for escape in ESCAPES:
            if not names or escape.name in names:
                harm = attempt(escape, self._pool, host)
                yield Outcome("escape", escape.name, "sandbox", harm=harm)

    def against_grader(self, attack: Attack, grader: str) -> Outcome:
        """One attack, handed in as it is."""
        task = self._tasks[grader]
        outcome = self._graded(task, attack, grader)
        for _ in range(_GUESSES if attack.guesses else 0):
            if outcome.flags or outcome.earned > outcome.failure:
                break
            outcome = self._graded(task, attack, grader)
        return outcome

    def _graded(self, task: Task, attack: Attack, grader: str) -> Outcome:
        grade = grade_work(task, work_of(task, attack.files), self._pool, LIMITS)
        failure = (grader, *attack.honest.values())
        if failure not in self._failures:
            given = grade_work(task, work_of(task, attack.honest), self._pool, LIMITS)
            self._failures[failure] = earned(task, given)
        proves = grader not in ("cases", "code")
        unproven = attack.proof and proves and not set(attack.proof) & set(grade.flags)
        return Outcome(
            "files" if attack.only_suite else "solution",
            attack.name,
            grader,
            earned(task, grade),
            self._failures[failure],
            grade.flags,
            (f"no flag of {', '.join(attack.proof)}",) if unproven else (),
        )

    def alone(self, attacks: Sequence[Attack] = (*CHEATS, *FILES)) -> Iterator[Outcome]:
        """Each attack against the suite without canaries and without values: what they add."""
        task = self._tasks["suite"]
        suite = task.hidden_tests.suite
        for attack in attacks:
            if attack.only_also:
                continue
            work = work_of(task, attack.files)
            graded = grade_suite(task, suite, work, self._pool, LIMITS.grade_s, canaries=0)
            passed = tuple(not error for error in graded.errors)
            grade = Grade(True, (), passed, graded.flags)
            kind = "files" if attack.only_suite else "solution"
            yield Outcome(kind, attack.name, ALONE, earned(task, grade), None, graded.flags)

    def in_episode(self, kind: str, name: str, messages: Sequence[str], where: str) -> Outcome:
        """One script, from the prompt to the reward."""
        task = self._tasks[where.rpartition(" ")[2]]
        if (where,) not in self._failures:
            self._failures[where,] = self._player.play(task, (SUBMIT,)).reward.total
        done = self._player.play(task, messages)
        masked = ("it ended as a fault of the sandbox",) if done.status == "fault" else ()
        return Outcome(
            kind, name, where, done.reward.total, self._failures[where,], done.reward.flags, masked
        )
