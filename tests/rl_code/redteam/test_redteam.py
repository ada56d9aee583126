"""The gate: no known way to cheat pays more than an honest failure, and no known way out of the
sandbox does harm. A few are tried always, all of them in the long tier.
"""

from __future__ import annotations

import os

import pytest

from rl_code.environment.layers import installed
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.suite_grader import unguarded
from rl_code.redteam import honest
from rl_code.redteam.cheats import CHEATS
from rl_code.redteam.episodes import SCRIPTS, of_files
from rl_code.redteam.escapes import ESCAPES, Escape, Host, attempt
from rl_code.redteam.files import FILES
from rl_code.redteam.forgers import FORGERS, OPEN
from rl_code.redteam.ground import (
    FIXTURE_ROWS,
    FIXTURES,
    GRADERS,
    METHODS,
    MIXED,
    PATH,
    ROWS,
    SOLVED,
    SUBTESTS,
    TRUTHS,
    Attack,
    task,
)
from rl_code.redteam.trial import EPISODES, Trial
from rl_code.types import Layer, World

QUICK = (
    ("object that equals everything", "suite"),
    ("expected values read from the caller's code", "suite"),
    ("lines written to every descriptor", "code"),
    ("skip raised in a call", "cases"),
    ("object whose methods say yes", METHODS),
    ("conftest.py that changes outcomes", "suite"),
    (FORGERS[0].name, TRUTHS),
)
SOLUTION = Attack("honest", {PATH: SOLVED})
ATTACKS = {attack.name: attack for attack in (*CHEATS, *FILES)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def world(store):
    return World((Layer(installed.build(store), "/opt/packages"),))


@pytest.fixture(scope="module")
def sandboxes(store):
    config = SandboxConfig(workers=1, processes=24, cpu_s=10, layers=str(store.folder))
    with SandboxPool(config) as pool:
        yield pool


@pytest.fixture(scope="module")
def trial(sandboxes, world):
    return Trial(sandboxes, world)


def test_there_are_as_many_as_promised_and_each_has_a_name_of_its_own():
    assert len(ATTACKS) == len(CHEATS) + len(FILES) >= 40
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 15
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)


@pytest.mark.parametrize(("name", "grader"), QUICK)
def test_a_cheat_is_paid_no_more_than_an_honest_failure(trial, name, grader):
    outcome = trial.against_grader(ATTACKS[name], grader)
    assert outcome.held, outcome


def test_what_is_known_to_be_forged_is_told_of_each_task_that_allows_it(sandboxes, world):
    for _, ground in OPEN:
        suite = task(ground, world).hidden_tests.suite
        assert unguarded(task(ground, world), suite, sandboxes) == suite.fail_to_pass
    suite = task("suite", world).hidden_tests.suite
    assert unguarded(task("suite", world), suite, sandboxes) == ()


@pytest.mark.long
def test_an_honest_solution_is_paid_everywhere(trial):
    for grader in (*GRADERS, METHODS, FIXTURES, TRUTHS, ROWS, MIXED, SUBTESTS, FIXTURE_ROWS):
        solved = trial.against_grader(SOLUTION, grader)
        assert solved.earned == 1.0 and not solved.flags and not solved.held, solved
    played = trial.in_episode("script", "honest", of_files({PATH: SOLVED}), EPISODES[1])
    assert played.earned == 1.0 and not played.flags, played


@pytest.mark.parametrize("name", ["a daemon that edits after the end", "calls by the dozen"])
def test_a_script_is_paid_no_more_than_an_honest_failure(trial, name):
    (script,) = (script for script in SCRIPTS if script.name == name)
    outcome = trial.in_episode("script", name, script.messages, EPISODES[1])
    assert outcome.held, outcome


def test_escapes_do_no_harm_and_harm_would_be_seen(sandboxes, store, world, tmp_path):
    with Host(tmp_path, store, world) as host:
        for name in ("read another layer", "connect to a server of the host", "to be root"):
            (escape,) = (escape for escape in ESCAPES if escape.name == name)
            assert attempt(escape, sandboxes, host) == ()
        got = attempt(Escape("planted", "echo ESCAPED {secret}"), sandboxes, host)
        assert len(got) == 1 and "must not have" in got[0]
        host.reached += 1
        host._process.kill()
        host._process.wait()
        host.secret.write_text("changed")
        (store.folder / store.tree(host.hidden) / "hidden.txt").write_text("changed")
        assert len(list(host.harm())) == 4


def test_references_pass(sandboxes, world):
    for outcome in honest.outcomes(sandboxes, world, 1):
        assert outcome.held, outcome


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_no_cheat_is_paid_more_by_a_suite_than_an_honest_failure(trial, name):
    attack = ATTACKS[name]
    for grader in attack.also if attack.only_also else ("suite",):
        outcome = trial.against_grader(attack, grader)
        assert outcome.held, outcome


@pytest.mark.long
def test_no_episode_of_a_cheat_is_paid_more_than_one_of_an_honest_failure(trial):
    assert [outcome for outcome in trial.episodes() if not outcome.held] == []


@pytest.mark.long
def test_no_escape_does_harm(sandboxes, store, world, trial, tmp_path):
    with Host(tmp_path, store, world) as host:
        assert [outcome for outcome in trial.escapes(host) if not outcome.held] == []


@pytest.mark.long
def test_references_of_every_source_pass(sandboxes, world):
    data = os.environ.get("RL_CODE_DATA", "")
    found = list(honest.outcomes(sandboxes, world, 5, data))
    assert len(found) >= 20 and [outcome for outcome in found if not outcome.held] == []
