"""Rows of SWE-bench and its relatives become tasks: world, tests, reference; wrong ones say why."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from rl_code.config.named import Named
from rl_code.evaluation.suites import SuiteConfig
from rl_code.tasks import swe
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import Refusal
from rl_code.tasks.swe_rows import statuses
from rl_code.tasks.unittest_ids import ForeignId, UnittestIds
from rl_code.tasks.validate import judge, judge_all
from rl_code.types import Limits, Suite
from tests.rl_code.environment.layers.test_image import entry, tarred, write_image
from tests.rl_code.tasks import projects
from tests.rl_code.tasks.projects import BROKEN, FAILING, FIXED, NEW_TESTS, PASSING, SOURCE, TESTS


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories") / "lab" / "shop"
    return {"folder": str(folder.parents[1]), **projects.make_shop(folder)}


@pytest.fixture
def pool(layered_pool):
    return layered_pool


def source(path: Path, shop, **settings):
    places = {"repositories": shop["folder"], **settings.pop("places", {})}
    return find_source(Named("swe", {"path": str(path), "places": places, **settings}), "tasks")


def load(rows, shop, pool, tmp_path, **settings):
    path = projects.write_rows(tmp_path / "tasks.jsonl", *rows)
    return source(path, shop, **settings).load(pool, None)


def tree_of(store, task) -> Path:
    (layer,) = task.world.layers
    return store.folder / store.tree(layer.digest)


def test_a_row_of_swe_bench_becomes_a_task(shop, store, pool, tmp_path):
    (task,) = load([projects.swe_row(shop)], shop, pool, tmp_path)
    assert task.id == "lab__shop-1" and task.messages[0]["content"].startswith(projects.STATEMENT)
    suite = Suite({TESTS: NEW_TESTS}, (FAILING,), (PASSING,))
    assert task.hidden_tests.suite == suite and len(task.visible_tests) == 0
    assert task.reference == {SOURCE: FIXED} and task.meta["deleted"] == ("old.txt",)
    assert task.meta["repository"] == "lab/shop" and task.meta["base_commit"] == shop["base"]
    tree = tree_of(store, task)
    assert (tree / SOURCE).read_text() == BROKEN
    assert "FUTURE" not in projects.git(tree, "log", "--all", "--format=%B")
    assert projects.git(tree, "rev-list", "--all").split() == [shop["base"], shop["first"]]
    # the repository itself was not written to
    assert projects.git(Path(shop["folder"], "lab/shop"), "status", "--porcelain") == ""


def test_worlds_stay_when_the_repositories_are_gone(shop, store, pool, tmp_path):
    moved = tmp_path / "moved" / "lab__shop"  # another form of the name
    shutil.copytree(Path(shop["folder"], "lab/shop"), moved)
    settings = {"places": {"repositories": str(tmp_path / "moved")}}
    (task,) = load([projects.swe_row(shop)], shop, pool, tmp_path, **settings)
    shutil.rmtree(moved)
    with pool.open({}, task.world) as sandbox:
        assert sandbox.read_file(SOURCE) == BROKEN


def smith_row(shop):
    bug = projects.git(
        Path(shop["folder"], "lab/shop"), "diff", shop["fix"], shop["base"], "--", SOURCE
    )
    row = projects.swe_row(
        shop, patch=bug, repo=f"swesmith/lab__shop.{shop['fix'][:8]}", instance_id="smith"
    )
    del row["base_commit"], row["test_patch"]
    return row


def test_in_swe_smith_the_patch_makes_the_bug(shop, store, pool, tmp_path):
    (task,) = load([smith_row(shop)], shop, pool, tmp_path)
    tree = tree_of(store, task)
    assert (tree / SOURCE).read_text() == BROKEN and task.reference == {SOURCE: FIXED}
    assert task.hidden_tests.suite.files == {TESTS: NEW_TESTS} and not (tree / TESTS).exists()
    # one commit without a past: neither the fixed file nor the tests can be found in it
    assert len(projects.git(tree, "rev-list", "--all").split()) == 1
    assert "prices[1:]" in projects.git(tree, "grep", "sum", "HEAD")
    objects = projects.git(tree, "cat-file", "--batch-all-objects", "--batch")
    assert "sum(prices)" not in objects and "test_total" not in objects


def test_a_patch_without_one_of_the_tests_may_mend(shop, store, pool, tmp_path):
    row = projects.swe_row(shop, test_patch="")
    (task,) = load([row], shop, pool, tmp_path, breaks=False)
    assert task.reference == {SOURCE: FIXED} and task.hidden_tests.suite.files == {}
    with pytest.raises(TaskFileError, match="git does not apply the patch"):
        load([projects.swe_row(shop, test_patch="", base_commit=shop["fix"])], shop, pool, tmp_path)


def r2e_row(shop, **changes):
    def log(status):
        return (
            "=== short test summary info ===\n"
            f"PASSED r2e_tests/test_1.py::test_largest\n{status} r2e_tests/test_1.py::test_total"
            f"{' - AssertionError' if status == 'FAILED' else ''}\n"
        )

    result = {
        "test_file_names": ["test_1.py"],
        "test_file_codes": [NEW_TESTS],
        "old_commit_res_stdout": log("FAILED"),
        "new_commit_res_stdout": log("PASSED"),
    }
    row = {
        "repo_name": "shop",
        "docker_image": f"lab/shop_final:{shop['fix']}",
        "commit_hash": shop["fix"],
        "parsed_commit_content": json.dumps({"old_commit_hash": f"{shop['fix']}^"}),
        "execution_result_content": json.dumps(result),
        "expected_output_json": "{}",
        "problem_statement": f"words [ISSUE]\n{projects.STATEMENT}\n[/ISSUE] words",
    }
    return {**row, **changes}


def test_in_r2e_gym_the_logs_say_which_tests_must_pass(shop, store, pool, tmp_path):
    settings = {"places": {"repositories": str(Path(shop["folder"], "lab"))}}
    (task,) = load([r2e_row(shop)], shop, pool, tmp_path, **settings)
    test = "r2e_tests/test_1.py"
    suite = Suite({test: NEW_TESTS}, (f"{test}::test_total",), (f"{test}::test_largest",))
    assert task.hidden_tests.suite == suite and task.reference == {SOURCE: FIXED}
    assert task.messages[0]["content"].startswith(projects.STATEMENT)
    assert (tree_of(store, task) / SOURCE).read_text() == BROKEN


def test_an_image_keeps_what_it_built_and_loses_its_future(shop, store, pool, tmp_path):
    root = tmp_path / "images" / "lab__shop-1"
    (root / "usr").mkdir(parents=True)
    shutil.copytree(Path(shop["folder"], "lab/shop"), root / "testbed")
    projects.git(root / "testbed", "checkout", "-q", shop["base"])
    (root / "testbed" / "built.so").write_text("built")
    places = {"repositories": "", "images": str(tmp_path / "images")}
    (task,) = load([projects.swe_row(shop)], shop, pool, tmp_path, places=places)
    assert task.world.workspace == "/testbed"
    assert [layer.at for layer in task.world.layers] == ["/", "/"]
    top = store.folder / store.tree(task.world.layers[-1].digest) / "testbed"
    assert projects.git(top, "rev-list", "--all").split() == [shop["base"], shop["first"]]
    assert [path.name for path in top.iterdir()] == [".git"]
    with pool.open({}, task.world) as sandbox:
        assert sandbox.read_file("built.so") == "built"
        assert sandbox.read_file(".git/HEAD") == "ref: refs/heads/main\n"
        with pytest.raises(FileNotFoundError):
            sandbox.read_file(".git/refs/heads/trunk")


def tar_of(folder: Path, under: str, keep) -> bytes:
    """The files of a folder that ``keep`` wants, as a layer of an image."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and keep(path)]
    return tarred(
        *(entry(f"{under}/{path.relative_to(folder)}", path.read_bytes()) for path in files)
    )


def test_an_oci_image_may_hold_the_repository_in_several_layers(shop, store, pool, tmp_path):
    """As images do that are built by a clone and a commit: objects of git lie in two layers."""
    clone = tmp_path / "clone"
    projects.git(tmp_path, "clone", "-q", shop["folder"] + "/lab/shop", str(clone))
    projects.git(clone, "checkout", "-q", shop["base"])
    before = set(clone.rglob("*"))
    projects.write(clone, {"built.so": "built"})
    projects.git(clone, "commit", "-q", "--allow-empty", "-m", "FUTURE of the image")
    head = projects.git(clone, "rev-parse", "HEAD").strip()
    tars = [
        tar_of(clone, "work", lambda path: path in before),
        tar_of(clone, "work", lambda path: path not in before),
    ]
    (tmp_path / "images" / "lab__shop_final__7").mkdir(parents=True)
    write_image(tmp_path / "images" / "lab__shop_final__7", tars, {"WorkingDir": "/work"})
    places = {"repositories": "", "images": str(tmp_path / "images")}
    # the commit that the work starts from lies in the upper layer
    row = projects.swe_row(shop, base_commit=head, image_name="hub/lab/shop_final:7")
    with pytest.raises(TaskFileError, match="has no image named hub/lab/shop_final:7"):
        load([row], shop, pool, tmp_path, places=places)
    row["image_name"] = "lab/shop_final:7"
    (task,) = load([row], shop, pool, tmp_path, places=places)
    assert task.world.workspace == "/work" and len(task.world.layers) == 3
    top = store.folder / store.tree(task.world.layers[-1].digest) / "work"
    history = projects.git(top, "rev-list", "--all").split()
    assert history == [head, shop["base"], shop["first"]]
    with pool.open({}, task.world) as sandbox:
        assert sandbox.read_file("built.so") == "built" and sandbox.read_file(SOURCE) == BROKEN


def test_over_an_image_swe_smith_breaks_files_and_takes_tests_away(shop, store, pool, tmp_path):
    root = tmp_path / "images" / "smith"
    (root / "usr").mkdir(parents=True)
    shutil.copytree(Path(shop["folder"], "lab/shop"), root / "testbed")
    places = {"repositories": "", "images": str(tmp_path / "images")}
    (task,) = load([smith_row(shop)], shop, pool, tmp_path, places=places)
    with pool.open({}, task.world) as sandbox:
        assert sandbox.read_file(SOURCE) == BROKEN
        with pytest.raises(FileNotFoundError):
            sandbox.read_file(TESTS)


def test_a_bare_name_is_looked_up_among_the_tests(shop, pool, tmp_path):
    row = projects.swe_row(shop, FAIL_TO_PASS=["test_total"], PASS_TO_PASS='["test_largest"]')
    (task,) = load([row], shop, pool, tmp_path)
    assert task.hidden_tests.suite.ids == (FAILING, PASSING)


def test_parquet_holds_the_same_tasks(shop, pool, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    row = projects.swe_row(shop, PASS_TO_PASS=json.dumps([PASSING]))
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    (task,) = source(tmp_path / "tasks.parquet", shop).load(pool, None)
    assert load([row], shop, pool, tmp_path) == [task]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(FAIL_TO_PASS="[1"), "line 1, field 'FAIL_TO_PASS': expected a list in JSON, found"),
        (dict(FAIL_TO_PASS=[3]), r"'FAIL_TO_PASS': expected a list of ids of tests, found \[3\]"),
        (dict(FAIL_TO_PASS=[]), "'FAIL_TO_PASS': expected at least one id of a test"),
        (dict(PASS_TO_PASS=[FAILING]), "'PASS_TO_PASS': expected ids that FAIL_TO_PASS does not"),
        (dict(PASS_TO_PASS=None), "'PASS_TO_PASS': expected a string or a list, found None"),
        (dict(patch=" "), "'patch': expected a patch, found an empty text"),
        (dict(base_commit=""), "'base_commit': expected the commit that the work starts from"),
        (dict(base_commit=7), "'base_commit': expected a string, found 7"),
        (dict(problem_statement=7), "'problem_statement': expected a string, found 7"),
        (dict(instance_id=7), "'instance_id': expected a string, found 7"),
    ],
)
def test_a_malformed_row_is_named_by_line_and_column(shop, pool, tmp_path, change, message):
    with pytest.raises(TaskFileError, match=message):
        load([projects.swe_row(shop, **change)], shop, pool, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(repo="lab/none"), "has no repository lab/none, lab__none, none"),
        (dict(repo="../shop"), "has no repository"),
        (dict(base_commit="0" * 40), "the repository has no commit 00000000"),
        (dict(patch="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"), "git does not apply the patch"),
        (dict(test_patch="nonsense"), "test_patch: git does not apply the patch"),
        (dict(FAIL_TO_PASS=["test_x"]), "the test 'test_x' is none of pytest's"),
    ],
)
def test_what_cannot_be_built_is_told_for_each_task(shop, pool, tmp_path, change, message):
    rows = [projects.swe_row(shop, **change), projects.swe_row(shop, instance_id="good")]
    path = projects.write_rows(tmp_path / "tasks.jsonl", *rows)
    (_, why), (id, good) = source(path, shop).load_each(pool, None)
    assert message in why and id == good.id == "good"
    with pytest.raises(TaskFileError, match=r"task lab__shop-1: .*works=FILE loads those alone"):
        source(path, shop).load(pool, None)
    working = tmp_path / "working.json"
    working.write_text(json.dumps({"works": ["good"]}))
    assert [task.id for task in source(path, shop, works=str(working)).load(pool, None)] == ["good"]


def test_a_row_that_cannot_be_read_leaves_the_others_alone(shop, pool, tmp_path):
    rows = [projects.swe_row(shop, instance_id=id) for id in ("first", "last")]
    odd = [
        projects.swe_row(shop, instance_id="nul", patch="--- a/\0\n"),
        projects.swe_row(shop, instance_id="half", patch="\ud83d"),
        projects.swe_row(shop, instance_id="base", base_commit="a\0b"),
        projects.swe_row(shop, instance_id="path", test_patch="--- a/x\n+++ b/../../x\n"),
        projects.swe_row(shop, FAIL_TO_PASS=3),
        {"repo_name": "x"},
    ]
    lines = [json.dumps(row) for row in (rows[0], *odd, rows[0])]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join([*lines, "{", json.dumps(rows[1])]))
    found = list(source(path, shop).load_each(pool, None))
    good = [task.id for _, task in found if not isinstance(task, Refusal)]
    assert good == ["first", "last"] and len(found) == 10
    assert [id for id, why in found if isinstance(why, Refusal)] == [
        *("nul", "half", "base", "path"), *(f"tasks.jsonl:{line}" for line in (6, 7, 8, 9)),
    ]  # fmt: skip
    working = tmp_path / "working.json"
    working.write_text(json.dumps({"works": ["last"]}))
    assert [task.id for task in source(path, shop, works=str(working)).load(pool, None)] == ["last"]


# Tests of unittest in modules that a runner imports from the folder ``tests``, as Django's.
CASES = """import unittest

from shop import prices


class PriceTests(unittest.TestCase):
    def test_total(self):
        \"\"\"The first price is one of them.\"\"\"
        self.assertEqual(prices.total([1, 2]), 3)


class OtherTests(PriceTests):
    test_total = None

    def test_largest(self):
        self.assertEqual(prices.largest([1, 3]), 3)
"""
FILE = "tests/prices/tests.py"


@pytest.fixture
def of_unittest(tmp_path):
    """Places of a repository with such tests, and a row on it by these ids."""
    folder = tmp_path / "repositories" / "lab" / "shop"
    shop = projects.make_shop(folder)
    projects.git(folder, "checkout", "-q", shop["base"])
    files = {"tests/prices/__init__.py": "", "prices/tests.py": "", "tests/only.py": CASES}
    base = projects.commit(folder, files, "runner")
    test = projects.commit(folder, {FILE: CASES}, "tests")
    patch = projects.git(folder, "diff", base, test)

    def row(failing, passing=()):
        return projects.swe_row(
            {**shop, "base": base},
            test_patch=patch,
            FAIL_TO_PASS=[*failing],
            PASS_TO_PASS=[*passing],
        )

    return {"folder": str(folder.parents[1])}, row


def test_ids_of_unittest_become_those_of_pytest(of_unittest, pool, packages, tmp_path):
    shop, row = of_unittest
    failing = "test_total (prices.tests.PriceTests)"
    passing = [
        "test_largest (prices.tests.OtherTests.test_largest)",
        "test_largest (only.OtherTests)",
        "test_largest (tests.only.OtherTests)",
    ]
    places = {"packages": packages}
    (task,) = load([row([failing], passing)], shop, pool, tmp_path, places=places)
    suite = task.hidden_tests.suite
    assert suite.fail_to_pass == (f"{FILE}::PriceTests::test_total",)
    only = "tests/only.py::OtherTests::test_largest"
    assert suite.pass_to_pass == (f"{FILE}::OtherTests::test_largest", only)
    limits = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=60.0)
    verdict = judge(task, pool, limits, runs=1)
    assert (verdict.reason, verdict.detail) == ("", "")


def test_files_that_may_be_executed_stay_so(shop, pool, packages, tmp_path):
    script = "diff --git a/{0} b/{0}\nnew file mode 100755\n--- /dev/null\n+++ b/{0}\n"
    script += "@@ -0,0 +1,2 @@\n+#!/bin/sh\n+echo {1}\n"
    test = "tests/test_scripts.py"
    lines = [
        "import subprocess",
        "def test_run():",
        "    for path in ('./run.sh', 'tests/help.sh'):",
        "        done = subprocess.run([path], capture_output=True, text=True)",
        "        assert done.stdout == 'done\\n'",
    ]
    added = "".join(f"+{line}\n" for line in lines)
    tests = f"--- /dev/null\n+++ b/{test}\n@@ -0,0 +1,{len(lines)} @@\n{added}"
    row = projects.swe_row(
        shop,
        patch=script.format("run.sh", "done") + "diff --git a/old.txt b/old.txt\n"
        "old mode 100644\nnew mode 100755\n",
        test_patch=tests + script.format("tests/help.sh", "done"),
        FAIL_TO_PASS=[f"{test}::test_run"],
        PASS_TO_PASS=[],
    )
    (task,) = load([row], shop, pool, tmp_path, places={"packages": packages})
    assert task.meta["modes"] == dict.fromkeys(("run.sh", "old.txt", "tests/help.sh"), 0o755)
    limits = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=60.0)
    verdict = judge(task, pool, limits, runs=1)
    assert (verdict.reason, verdict.detail) == ("", "")


def test_an_id_that_is_the_first_line_of_a_docstring_names_the_one_test_that_has_it():
    files = {FILE: CASES}
    others = {"tests/more/tests.py": CASES.replace("first price", "second price")}
    ids = ("The first price is one of them.", "test_total (more.tests.PriceTests)")
    found = UnittestIds({**files, **others}.get, files, ids)
    assert found.find(ids[0]) == f"{FILE}::PriceTests::test_total"
    second = "The second price is one of them."
    assert found.find(second) == "tests/more/tests.py::PriceTests::test_total"
    with pytest.raises(ForeignId, match="which 0 tests have"):
        UnittestIds({**files, **others}.get, files, ids[:1]).find(second)
    with pytest.raises(ForeignId, match="which 2 tests have"):
        UnittestIds({**files, "tests/b.py": CASES}.get, {**files, "tests/b.py": ""}, ids).find(
            ids[0]
        )


def test_ids_in_a_log_of_pytest_may_hold_spaces_and_dashes():
    log = """= short test summary info =
PASSED tests/test_a.py::test_b[one - two]
PASSED tests/test_a.py::test_b[a] - b]
FAILED tests/test_a.py::test_c[one - two] - assert [1] - 2 == 3
ERROR tests/test_a.py::TestD::test_e - no [thing] - at all
FAILED tests/test_a.py
"""
    assert statuses(log) == {
        "tests/test_a.py::test_b[one - two]": "PASSED",
        "tests/test_a.py::test_b[a] - b]": "PASSED",
        "tests/test_a.py::test_c[one - two]": "FAILED",
        "tests/test_a.py::TestD::test_e": "ERROR",
    }


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("test_total (money.tests.PriceTests)", "neither money/tests.py nor tests/money/tests.py"),
        ("test_total (prices.tests.Gone)", f"prices/tests.py and {FILE} has no class Gone"),
        ("No test says this.", "is a description of a test and not its id.*which 0 tests have"),
        ("test_total (prices.tests.PriceTests) (i=1)", "is a description of a test"),
        ("setUpClass (prices.tests.PriceTests)", "is a step around tests and no test"),
        ("test_nothing", "is none of pytest's"),
    ],
)
def test_ids_that_pytest_cannot_be_asked_for_are_counted_apart(
    of_unittest, pool, tmp_path, id, why
):
    shop, row = of_unittest
    good = row(["test_total (prices.tests.PriceTests)"])
    other = row(["test_total (prices.tests.PriceTests)"], [id]) | {"instance_id": "other"}
    missing = good | {"repo": "lab/none", "instance_id": "missing"}
    path = projects.write_rows(tmp_path / "tasks.jsonl", good, other, missing)
    (_, task), (_, refused), (_, unbuilt) = source(path, shop).load_each(pool, None)
    assert task.id == good["instance_id"] and re.search(why, str(refused))
    assert refused.reason == ForeignId.reason != unbuilt.reason
    verdicts = []
    refusals = [("other", refused), ("missing", unbuilt)]
    judge_all(refusals, pool, Limits(1, 1, 1, 1, 1.0), 1, 1, {}, verdicts.append)
    assert [verdict.reason for verdict in verdicts] == [refused.reason, "cannot be built"]


@pytest.fixture
def built(monkeypatch):
    """Ids of the rows that became tasks with worlds, in order."""
    found = []

    def counted(row, *rest):
        found.append(row.id)
        return task_of(row, *rest)

    task_of = swe._task
    monkeypatch.setattr(swe, "_task", counted)
    return found


def test_only_worlds_that_are_asked_for_are_built(shop, pool, tmp_path, built):
    names = [f"task-{number}" for number in range(6)]
    rows = [projects.swe_row(shop, instance_id=name) for name in names]
    path = projects.write_rows(tmp_path / "tasks.jsonl", *rows)
    working = tmp_path / "working.json"
    working.write_text(json.dumps({"works": ["task-4", "task-1"]}))
    tasks = source(path, shop, works=str(working)).load(pool, None)
    assert [task.id for task in tasks] == built == ["task-1", "task-4"]
    built.clear()
    suite = SuiteConfig("first", Named("swe"), count=3)
    chosen = suite.choose(source(path, shop).one_by_one(pool, None), lambda task: 0, "")
    assert [task.id for task in chosen] == built == names[:3]
    built.clear()
    assert [task.id for task in source(path, shop).load(pool, None)] == built == names


def test_a_patch_leads_nowhere_out_of_the_repository(shop, pool, tmp_path):
    for path in ("../evil", ".git/hooks/post-checkout"):
        patch = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
        with pytest.raises(TaskFileError, match="git does not apply the patch"):
            load([projects.swe_row(shop, patch=patch)], shop, pool, tmp_path)
    link = "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n\\ No newline at end of file\n"
    with pytest.raises(TaskFileError, match="l is a link or a submodule"):
        load([projects.swe_row(shop, patch=link)], shop, pool, tmp_path)


def test_a_store_must_be_named(shop, tmp_path):
    path = projects.write_rows(tmp_path / "tasks.jsonl", projects.swe_row(shop))
    with pytest.raises(TaskFileError, match=r"name the folder of a layer store as sandbox\.layers"):
        source(path, shop).load(None, None)
