"""Tasks made from a small package: each is what it says, holds, and gives nothing away."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from rl_code.config.named import Named
from rl_code.environment.grading import grade_work
from rl_code.environment.layers import installed
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.tasks import made
from rl_code.tasks.api import find_source
from rl_code.tasks.makers import bugs, package, testfiles
from rl_code.tasks.makers.candidate import Change, applied, broken
from rl_code.tasks.makers.make import Maker, Settings, progress
from rl_code.tasks.makers.package import PackageError, Pin
from rl_code.tasks.makers.survey import Function, Survey, TestFunction
from rl_code.tasks.row_files import TaskFileError
from rl_code.types import Limits

PRICES = '''"""Prices."""


def discount(price, percent):
    """The price after a discount in percent, never below 0."""
    if percent > 100:
        return 0
    rest = 100 - percent
    return price * rest // 100


def label(name, price):
    """``name: price``, or the price alone."""
    if not name:
        return str(price)
    text = name + ": "
    return text + str(price)


def unused(x):
    y = x + 1
    return y
'''
BASKET = '''"""Baskets."""

from shop.prices import discount


class Basket:
    """Things that somebody wants to buy."""

    def __init__(self):
        self.prices = []

    def add(self, price, count=1):
        """Puts ``count`` things of a price into the basket."""
        for _ in range(count):
            self.prices.append(price)

    def total(self, percent=0):
        """What all of it costs after a discount."""
        result = 0
        for price in self.prices:
            result += discount(price, percent)
        return result
'''
TEST_PRICES = """import pytest

from shop.prices import discount, label

TABLE = [(100, 10, 90), (50, 10, 45)]
OTHER = [(10, 0, 10)]


@pytest.mark.parametrize("price, percent, want", TABLE)
def test_discount_table(price, percent, want):
    assert discount(price, percent) == want


@pytest.mark.parametrize("price, percent, want", OTHER)
def test_discount_nothing(price, percent, want):
    assert discount(price, percent) == want


def test_discount_all():
    assert discount(30, 100) == 0
    assert discount(30, 120) == 0


def test_discount_rounds():
    assert discount(99, 50) == 49


def test_label():
    assert label("tea", 3) == "tea: 3"


def test_label_of_bread():
    assert label("bread", 2) == "bread: 2"


def test_label_without_name():
    assert label("", 3) == "3"


def test_fails():
    assert label("a", 1) == ""
"""
TEST_BASKET = """import unittest

from shop.basket import Basket


class TestBasket(unittest.TestCase):
    def setUp(self):
        self.basket = Basket()

    def test_total(self):
        self.basket.add(3)
        self.assertEqual(self.basket.total(), 3)

    def test_total_of_many(self):
        self.basket.add(3, 4)
        self.assertEqual(self.basket.total(), 12)

    def test_total_with_discount(self):
        self.basket.add(100)
        self.assertEqual(self.basket.total(50), 50)

    def test_empty(self):
        self.assertEqual(self.basket.total(), 0)
"""
FILES = {
    "src/shop/__init__.py": "from shop.basket import Basket\n",
    "src/shop/prices.py": PRICES,
    "src/shop/basket.py": BASKET,
    "tests/test_prices.py": TEST_PRICES,
    "tests/test_basket.py": TEST_BASKET,
    "tests/expected.json": "[1]\n",
    "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\npython_files = test_*.py\n",
    "build/lib/shop/prices.py": PRICES,
    "src/shop/__pycache__/prices.cpython-312.pyc": "bytecode",
    ".git/HEAD": "ref: refs/heads/main\n",
}
LIMITS = Limits(turns=4, tokens=600, turn_tokens=200, test_runs=3, command_s=60.0, grade_s=300.0)


def archive(path: Path, files: dict[str, str], name: str = "shop-1.0") -> Pin:
    """Writes a source distribution; its pin."""
    with tarfile.open(path, "w:gz") as packed:
        for file, text in files.items():
            info = tarfile.TarInfo(f"{name}/{file}")
            info.size = len(text.encode())
            packed.addfile(info, io.BytesIO(text.encode()))
    project, _, version = name.rpartition("-")
    return Pin(project, version, hashlib.sha256(path.read_bytes()).hexdigest())


@dataclasses.dataclass
class Made:
    folder: Path
    pin: Pin
    store: LayerStore
    runner: str
    maker: Maker
    pool: SandboxPool


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "sdists").mkdir()
    pin = archive(folder / "sdists" / "shop-1.0.sdist", FILES)
    store = LayerStore(folder / "layers")
    runner = installed.build(store)
    config = SandboxConfig(
        workers=1, memory_mb=1024, workspace_mb=32, cpu_s=600, processes=32,
        output_bytes=1 << 24, layers=str(store.folder),
    )  # fmt: skip
    with SandboxPool(config) as pool:
        maker = Maker(pin, folder, Settings(deletions=4, bugs=5, pairs=1), store, runner)
        maker.run(pool, lambda: False)
        rows = maker.rows()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / made.FILE).write_text(lines)
        yield Made(folder, pin, store, runner, maker, pool)


def test_tasks_of_every_kind_are_made(shop):
    tally = shop.maker.tally
    assert not tally.refused
    # Basket is imported by the package itself, so it can only be emptied.
    assert tally.made["removed"] + tally.made["emptied"] == 4
    assert tally.made["bug"] == 5 and tally.made["bugs"] == 1
    assert tally.tests == 11  # all but the one that fails
    assert sum(tally.tried.values()) == sum(tally.made.values()) + sum(tally.rejected.values())


@pytest.mark.long
def test_tasks_fail_at_the_start_and_pass_with_the_reference(shop):
    tasks = made.load(shop.folder)
    kinds = {task.meta["kind"]: task for task in tasks}
    assert {"removed", "bug", "bugs"} <= kinds.keys()
    for task in kinds.values():
        before = grade_work(task, task.files, shop.pool, LIMITS)
        after = grade_work(task, {**task.files, **task.reference}, shop.pool, LIMITS)
        assert all(after.hidden) and all(after.visible), task.id
        assert not all(before.hidden)
        assert not after.flags
        wanted = task.hidden_tests.suite
        failed = [name for name, ok in zip(wanted.ids, before.hidden, strict=True) if not ok]
        assert tuple(failed) == wanted.fail_to_pass


@pytest.mark.long
def test_both_bugs_of_a_pair_must_be_mended(shop):
    (task,) = made.load(shop.folder, kinds=("bugs",))
    assert len(task.reference) == 2
    for path, text in task.reference.items():
        grade = grade_work(task, {**task.files, path: text}, shop.pool, LIMITS)
        assert not all(grade.hidden)


def test_hidden_tests_are_not_in_the_world_and_not_among_the_visible_ones(shop):
    for task in made.load(shop.folder):
        hidden = task.hidden_tests.suite
        visible = task.visible_tests.suite
        names = {name.partition("[")[0] for name in hidden.ids}
        seen = {name.partition("[")[0] for name in visible.ids} if visible else set()
        assert not names & seen
        assert len(seen) <= 2
        shown = "".join(text for path, text in task.files.items() if path not in task.reference)
        assert not any(f"def {name.rpartition('::')[2]}(" in shown for name in names)
        # a table of one side stays there
        assert not ("TABLE" in shown and "TABLE" in "".join(hidden.files.values()))
        with shop.pool.open(task.files, task.world) as sandbox:
            paths = set(sandbox.list_files())
        tests = set(visible.files) if visible else set()
        assert {path for path in paths if "tests/" in path} == tests
        assert not any(".git" in path or "build/" in path or "pyc" in path for path in paths)


def test_nothing_of_the_answer_can_be_found_in_the_sandbox(shop):
    tasks = made.load(shop.folder, kinds=("removed", "emptied"))
    task = next(task for task in tasks if task.meta["functions"] == ("src/shop/prices.py:label",))
    script = (
        "grep -rl 'text + str(price)' /workspace /opt /tmp 2> /dev/null;"
        "find /workspace /opt /tmp -name '*prices*.pyc' 2> /dev/null; git log 2>&1 | head -1;"
        "cd /tmp && python -c 'import shop.prices as p; print(p.label)' 2>&1 | tail -1"
    )
    with shop.pool.open(task.files, task.world) as sandbox:
        said = sandbox.run(["bash", "-c", script], timeout_s=120.0).stdout.splitlines()
    assert len(said) == 2 and "not a git repository" in said[0], said
    assert "No module named 'shop'" in said[1] or "function label" in said[1]


def test_messages_are_made_of_documentation_signature_and_names_of_tests(shop):
    found = made.load(shop.folder, kinds=("removed", "emptied"))
    tasks = {task.meta["functions"]: task for task in found}
    text = tasks[("src/shop/prices.py:label",)].messages[0]["content"]
    assert "def label(name, price):" in text
    assert "``name: price``, or the price alone." in text
    assert "label without name" in text
    assert "return" not in text
    for task in made.load(shop.folder, kinds=("bug", "bugs")):
        (message,) = task.messages
        visible = task.visible_tests.suite
        assert all(name in message["content"] for name in visible.fail_to_pass)
        assert not any(path in message["content"] for path in task.reference)


@pytest.mark.long
def test_a_run_that_was_killed_goes_on(shop, tmp_path):
    """What is known is not tried again; a line that was cut short is."""
    folder = tmp_path / "again"
    for name in ("sdists", "progress"):
        (folder / name).mkdir(parents=True)
    whole = shop.folder / "progress" / "shop-1.0.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    cut = folder / "progress" / "shop-1.0.jsonl"
    cut.write_text("".join(lines[:-2]) + lines[-2][:40])
    sdist = shop.folder / "sdists" / "shop-1.0.sdist"
    (folder / "sdists" / "shop-1.0.sdist").write_bytes(sdist.read_bytes())
    settings = Settings(deletions=4, bugs=5, pairs=1)
    stopped = Maker(shop.pin, folder, settings, shop.store, shop.runner)
    stopped.run(shop.pool, lambda: True)
    assert len(stopped.rows()) < len(shop.maker.rows())
    again = Maker(shop.pin, folder, settings, shop.store, shop.runner)
    again.run(shop.pool, lambda: False)
    assert {row["id"] for row in again.rows()} == {row["id"] for row in shop.maker.rows()}
    tried = [row["candidate"] for row in progress(cut) if "candidate" in row]
    assert len(tried) == len(set(tried))


def test_packages_that_cannot_be_used_are_refused(shop, tmp_path):
    def refused(files, name="other-1.0"):
        (tmp_path / "sdists").mkdir(exist_ok=True)
        pin = archive(tmp_path / "sdists" / f"{name}.sdist", files, name)
        maker = Maker(pin, tmp_path, Settings(), shop.store, shop.runner)
        maker.run(shop.pool, lambda: False)
        assert not maker.rows()
        return maker.tally.refused

    module = {"other/__init__.py": "def f():\n    return 1\n"}
    test = {"tests/test_f.py": "import other\n\n\ndef test_f():\n    assert other.f() == 1\n"}
    assert "ships no tests" in refused(module, "a-1")
    assert "no package to import" in refused(test, "b-1")
    broken_test = {"tests/test_f.py": "import nothing\n\n\ndef test_f():\n    pass\n"}
    assert "no test passes in the sandbox" in refused(module | broken_test, "c-1")
    # the runner of tests needs it, so every sandbox has it
    copy = {"iniconfig/__init__.py": "def f():\n    return 1\n"}
    assert "every sandbox has a copy" in refused(copy | test, "iniconfig-1")


def test_lists_of_packages_say_what_is_wrong():
    good = f"shop==1.0 --hash=sha256:{'0' * 64}"
    assert package.read_list(f"# ours\n{good}  # a shop\n") == [Pin("shop", "1.0", "0" * 64)]
    for text, words in (
        ("", "names no package"),
        ("shop==1.0", "line 1: expected name==version --hash"),
        (f"{good}\nshop>=1 --hash=sha256:00", "line 2"),
        (f"{good}\n{good}", "names shop twice"),
    ):
        with pytest.raises(PackageError, match=words):
            package.read_list(text)
    assert len(package.read_list(package.LIST.read_text())) >= 10


def test_a_distribution_with_another_hash_is_refused(tmp_path):
    pin = archive(tmp_path / "shop-1.0.sdist", FILES)
    other = dataclasses.replace(pin, digest="0" * 64)
    with pytest.raises(PackageError, match="has the sha256"):
        package.fetch(other, tmp_path)


def test_the_source_takes_kinds_and_packages(shop):
    def load(**settings):
        config = Named("made", {"folder": str(shop.folder), **settings})
        return find_source(config, "tasks").load(None, None)

    assert {task.meta["kind"] for task in load(kinds=("bug",))} == {"bug"}
    assert len(load(packages=("shop",))) == len(shop.maker.rows())
    with pytest.raises(TaskFileError, match="no task of the package 'toolz'"):
        load(packages=("toolz",))


def test_a_line_that_does_not_fit_its_layer_is_named(shop, tmp_path):
    row = shop.maker.rows()[0]
    changed = json.loads(json.dumps(row))
    changed["changes"][0]["old"][0] = "another line\n"
    (tmp_path / made.FILE).write_text(json.dumps(changed) + "\n")
    (tmp_path / made.LAYERS).symlink_to(shop.store.folder)
    with pytest.raises(TaskFileError, match="line 1, field 'id'"):
        made.load(tmp_path)


def test_every_mutation_is_one_small_change_that_python_reads():
    tests = (TestFunction("a", 1, "a", (), 0, 0), TestFunction("a", 2, "b", (), 0, 0))
    found = Function("src/shop/prices.py", "discount", 4, 9, tests)
    other = Function("src/shop/basket.py", "Basket.add", 12, 15, tests)
    lines = {"src/shop/prices.py": frozenset(range(40)), "src/shop/basket.py": frozenset(range(40))}
    survey = Survey((found, other), (), lines, ())
    sources = {"src/shop/prices.py": PRICES, "src/shop/basket.py": BASKET}
    shop = package.Package(Pin("shop", "1", "0"), None, sources, {}, {}, ("shop",))
    made_of = list(bugs.candidates(shop, survey, 100))
    kinds = {operator for one in made_of for operator in one.operators}
    assert {"off by one", "operator", "inverted condition", "removed branch"} <= kinds
    assert {"removed statement"} <= kinds
    for one in made_of:
        (change,) = one.changes
        after = broken(sources, one.changes)[change.path]
        before = sources[change.path]
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
        # the lines around are as they were
        assert len(set(before.splitlines()) - set(after.splitlines())) <= 2
    texts = {broken(sources, one.changes)[one.changes[0].path] for one in made_of}
    assert "if not (percent > 100):" in "".join(texts)
    assert "if percent >= 100:" in "".join(texts)
    assert "range(count - 1)" in "".join(texts)
    assert len(texts) == len(made_of)


def test_changes_apply_only_where_they_fit():
    change = Change("a.py", 2, ("b\n",), ("x\n", "y\n"))
    last = Change("a.py", 3, ("c\n",), ())
    assert applied("a\nb\nc\n", [change, last]) == "a\nx\ny\n"
    with pytest.raises(ValueError, match="line 2"):
        applied("a\nc\n", [change])


def test_parts_of_test_files_hold_what_their_tests_need():
    lines = {
        node.name: testfiles.first_line(node)
        for node in ast.parse(TEST_PRICES).body
        if isinstance(node, ast.FunctionDef)
    }
    text = testfiles.part(TEST_PRICES, frozenset({lines["test_discount_table"]}))
    assert "TABLE = " in text and "OTHER" not in text
    assert text.count("def test") == 1
    assert text.count("@pytest.mark.parametrize") == 1
    first = testfiles.first_line(ast.parse(TEST_BASKET).body[-1].body[1])
    basket = testfiles.part(TEST_BASKET, frozenset({first}))
    assert "def setUp" in basket and basket.count("def test") == 1
    assert "class" not in testfiles.part(TEST_BASKET, frozenset())
    only = "class A:\n    def test_a(self):\n        pass\n\n\nclass B(A):\n    pass\n"
    assert testfiles.part(only, frozenset()) == only.replace(
        "    def test_a(self):\n        pass\n", "    pass\n"
    )
    one, two = lines["test_discount_table"], lines["test_discount_nothing"]
    assert not testfiles.shared_tables(TEST_PRICES, frozenset({one}), frozenset({two}))
    same = TEST_PRICES.replace("OTHER)", "TABLE)")
    assert testfiles.shared_tables(same, frozenset({one}), frozenset({two})) == {"TABLE"}
