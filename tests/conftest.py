"""Shared test set-up, before anything imports jax: eight virtual CPU devices, and quick
compilation.

Tests compile many small programs and run each a few times, so the compiler's optimisation is
switched off, and fusions come from XLA's older emitters, which compile a program in less than half
the time. With RUN_SLOW=1 programs are compiled as users do, and hypothesis draws new examples.
"""

from __future__ import annotations

import collections
import gc
import os
import signal
from pathlib import Path

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from tests.costs import Costs
from tests.programs import CACHE, QUICKLY
from tests.rewriting import rewrite_a_share

SLOW = os.environ.get("RUN_SLOW") == "1"
FLAGS = {"--xla_force_host_platform_device_count": "8"} | ({} if SLOW else QUICKLY)

kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] not in FLAGS]
os.environ["XLA_FLAGS"] = " ".join(kept + [f"{name}={value}" for name, value in FLAGS.items()])

# Compiled programs are kept between runs and shared by the two processes. The key of an entry holds
# the program, its options and the versions, so a test that reads one runs what it would compile.
for name, value in CACHE.items():
    os.environ.setdefault(name, str(value))
    jax.config.update(name.lower(), type(value)(os.environ[name]))

# Examples are the same in every run, and may take any time, as on a machine that has much to do.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=not SLOW)
hypothesis.settings.load_profile("tests")
# Hypothesis would also try numbers and texts of those modules of the project that are imported: other
# examples in each worker, after seconds of reading all of them.
if not SLOW:
    providers._get_local_constants = lambda: providers._local_constants

# as in the background of a script; tests stop what they start
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The order of a run: what fails fastest, then quick tests, then long ones. Within the long ones those
# files first that take longest, so that no worker is left alone with one.
FIRST = ("test_imports.py", "test_docs.py", "test_packaging.py")
LONGEST = (
    "test_faults.py",
    "test_realtime_served.py",
    "test_bisect.py",
    "test_roles.py",
    "test_configs.py",
    "test_elastic.py",
    "test_kill.py",
)
# Files whose tests share one engine, which takes seconds to compile, or read the same syntax trees: one
# worker runs them all.
TOGETHER = dict.fromkeys([f"tests/{name}" for name in FIRST], "tests") | dict.fromkeys(
    [
        f"tests/people/serving/test_{name}.py"
        for name in ("completions", "endpoint", "mini_swe_agent", "ways")
    ],
    "tests/people/serving",
)


class Blocks(LoadScopeScheduling):
    """A worker gets tests of a file that follow each other: its quick ones or its long ones.

    Tests of a file share fixtures and compiled programs.
    """

    def schedule(self) -> None:
        self._blocks: dict[str, str] = {}
        blocks: collections.Counter[str] = collections.Counter()
        file = None
        for test in next(iter(self.registered_collections.values()), ()):
            if test.partition("::")[0] != file:
                file = test.partition("::")[0]
                blocks[file] += 1
            self._blocks[test] = f"{TOGETHER.get(file, file)} {blocks[file]}"
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._blocks[nodeid]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Blocks:
    """The scheduler that shares the tests among xdist's workers."""
    return Blocks(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of -n auto: one more than cores, since some tests wait, up to what memory allows."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


# What is imported and collected stays. Looking for garbage among it took a third of the collection.
gc.disable()


def pytest_sessionstart(session: pytest.Session) -> None:
    rewrite_a_share(session.config)


def pytest_collection_finish() -> None:
    """Looks for garbage less often, and no more in what tests and modules are made of.

    Tracing and lowering make many small objects that live as long as a program. By default all of
    them are looked through after every 700 new ones.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(200_000, 10, 10)


# Linux lets a process have 65,530 mappings of memory, and a compiled program takes several. A worker
# that has run most of the tests has had so many programs that a compiler's next mapping fails, which
# ends it (a segmentation fault).
MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Drops compiled programs after a module's tests where there are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


def every_value(items: list[pytest.Item]) -> list[pytest.Item]:
    """A few of a test's cases, in which each value of each parameter is."""

    def values(item: pytest.Item) -> set:
        # by their identity, since not all have hashes
        return {(name, id(value)) for name, value in item.callspec.params.items()}

    items = [item for item in items if not item.get_closest_marker("long")]
    missing = set().union(*map(values, items))
    chosen = []
    while missing:
        best = max(items, key=lambda item: len(values(item) & missing))  # the first of the best
        chosen.append(best)
        missing -= values(best)
    return chosen


def rank(item: pytest.Item) -> tuple[int, int]:
    """Orders the tests of a run."""
    name = item.path.name
    if not item.get_closest_marker("long"):
        return (name not in FIRST, 0)
    return 2, LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases beyond the quick ones as long, puts the tests in order, and skips what is marked
    slow unless RUN_SLOW=1.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        settings = same[0].get_closest_marker("quick").kwargs
        quick = every_value(same) if settings.get("each") else same[: settings["first"]]
        for item in same:
            if item not in quick:
                item.add_marker(pytest.mark.long)
    items.sort(key=rank)
    if SLOW:
        return
    for item in items:
        if marker := item.get_closest_marker("slow"):
            item.add_marker(
                pytest.mark.skip(reason=f"slow ({marker.kwargs['reason']}); set RUN_SLOW=1")
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs", type=int, default=0, help="Show so many tests and files by CPU time."
    )
    parser.addoption("--costs-file", help="A JSON file for what all tests took.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.option.costs, config.option.costs_file))


@pytest.fixture
def traced_once(monkeypatch):
    """Programs of equal configs are traced once in this process, however many runs there are."""
    from tests.rl_code.traced_once import MAKERS  # and with it all that a run imports

    for (module, name), make in MAKERS.items():
        monkeypatch.setattr(module, name, make)


@pytest.fixture
def x64():
    """float64 within a test."""
    with jax.enable_x64(True):
        yield
