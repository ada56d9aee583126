"""Cheats on tasks of others: what each grader pays for, and what lies in the agent's world."""

from __future__ import annotations

import pytest

from rl_code.config.named import Named
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.redteam import foreign
from rl_code.redteam.foreign import Paid
from rl_code.redteam.foreign_cheats import CHEATS
from rl_code.tasks.api import find_source
from rl_code.types import Limits
from tests.rl_code.tasks import projects
from tests.rl_code.tasks.harbor_folders import DOUBLE, write

LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=120.0)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    store = LayerStore(tmp_path_factory.mktemp("layers"))
    config = SandboxConfig(
        workers=1, layers=str(store.folder), cpu_s=120, processes=64, output_bytes=1 << 20
    )
    with SandboxPool(config) as pool:
        yield pool


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return str(projects.install_pytest(tmp_path_factory.mktemp("packages")))


def load(name, pool, path, **places):
    (task,) = find_source(Named(name, {"path": str(path), "places": places}), "tasks").load(
        pool, None
    )
    return task


def paid(task, pool, names):
    """What each grader pays, by attempt."""
    cheats = [cheat for cheat in CHEATS if cheat.name in names]
    assert len(cheats) == len(names)
    found: dict[str, dict[str, float | None]] = {}
    for one in foreign.tried(task, pool, LIMITS, cheats):
        found.setdefault(one.attempt, {})[one.grader] = one.earned
        assert not one.paid or not one.proven
    return found


@pytest.mark.long
def test_harbors_own_way_pays_for_what_ours_does_not(pool, packages, tmp_path):
    task = load("harbor", pool, write(tmp_path, DOUBLE), packages=packages)
    attempts = paid(
        task,
        pool,
        ["a process left behind that writes the reward", "a module pytest.py that ends well"],
    )
    ours = {"test.sh": 0.0, "suite alone": 0.0, "suite": 0.0, "both": 0.0}
    assert attempts.pop("nothing done") == {"as Harbor does": 0.0, **ours}
    assert set(attempts.pop("the reference").values()) == {1.0}
    assert list(attempts.values()) == [{"as Harbor does": 1.0, **ours}] * 2
    assert foreign.left_over(task, pool) == []


@pytest.mark.long
def test_every_cheat_is_paid_by_none_of_our_graders(pool, packages, tmp_path):
    task = load("harbor", pool, write(tmp_path, DOUBLE), packages=packages)
    attempts = list(foreign.tried(task, pool, LIMITS))
    ours = [one for one in attempts if one.grader in ("test.sh", "suite", "both")]
    assert [one for one in ours if one.paid and one.attempt != "the reference"] == []
    theirs = {one.attempt for one in attempts if one.grader == "as Harbor does" and one.paid}
    assert len(theirs) == 9  # the reference, and eight cheats


@pytest.mark.long
def test_rows_are_graded_as_their_benchmark_does_and_history_is_searched(pool, packages, tmp_path):
    shop = projects.make_shop(tmp_path / "repos" / "lab__shop")
    path = projects.write_rows(tmp_path / "tasks.jsonl", projects.swe_row(shop))
    task = load("swe", pool, path, repositories=str(tmp_path / "repos"), packages=packages)
    attempts = paid(task, pool, ["a conftest.py that lets every test pass"])
    ours = {"suite alone": 0.0, "suite": 0.0}
    assert attempts == {
        "nothing done": {"as SWE-bench does": 0.0, **ours},
        "the reference": {"as SWE-bench does": 1.0, "suite alone": 1.0, "suite": 1.0},
        "a conftest.py that lets every test pass": {"as SWE-bench does": 1.0, **ours},
    }
    # what the row's commit broke is whole in the commit before
    (left,) = foreign.left_over(task, pool)
    assert (left.what, left.path) == ("solution", projects.SOURCE)
    assert left.found.startswith("history ") and shop["first"].startswith(left.found[8:])


def test_solutions_and_tests_in_an_image_are_found(pool, packages, tmp_path):
    solved = "def double(x):\n    return 2 * x\n"
    folder = write(
        tmp_path,
        DOUBLE,
        **{"environment/Dockerfile": DOUBLE["environment/Dockerfile"] + "COPY old /var/old\n"},
        **{
            "environment/old/double.bak": solved,
            "environment/old/tests.py": DOUBLE["tests/test_outputs.py"],
        },
    )
    task = load("harbor", pool, folder, packages=packages)
    found = {(one.what, one.path, one.found) for one in foreign.left_over(task, pool)}
    assert found == {
        ("solution", "double.py", "file /var/old/double.bak"),
        ("hidden test", "/tests/test_outputs.py", "file /var/old/tests.py"),
    }


def test_graders_are_ranked_by_what_they_pay_for():
    def of(grader, attempt, earned, nothing=0.0, flags=()):
        return Paid("t", attempt, grader, earned, nothing, flags)

    cheat, other = CHEATS[0].name, CHEATS[1].name
    attempts = [
        of("weak", "nothing done", 0.0),
        of("weak", "the reference", 1.0),
        *(of("weak", name, 1.0) for name in (cheat, other)),
        of("strict", "nothing done", 0.25),
        of("strict", "the reference", 0.5, 0.25),
        of("strict", cheat, 0.25, 0.25, ("canary_passed",)),
        of("strict", other, None, 0.25),
        of("open", "nothing done", 1.0),
        of("open", "the reference", 1.0, 1.0),
        of("open", cheat, 0.5, 0.0),
        of("open", other, 0.0),
    ]
    assert foreign.ranked(attempts)[1:] == [
        ["strict", "0 of 1", "0", "1", "1 of 1", "0"],
        ["open", "1 of 2", "0", "0", "0 of 1", "1"],
        ["weak", "2 of 2", "2", "0", "0 of 1", "0"],
    ]
    rows = foreign.by_cheat(attempts)
    assert rows[0] == ["cheat", "weak", "strict", "open", "how to close it"]
    assert [row[1:4] for row in rows[1:]] == [
        ["1 of 1", "0 of 1", "1 of 1"],
        ["1 of 1", "-", "0 of 1"],
    ]
