"""The cost of a world of layers: opening a workspace over --layer_mb of layers, beside a bare one.

A layer of packages and one of a repository are made of random files. Bare sandboxes come from a
pool without a layer store, the others from a pool that has one; both pools take turns, so that a
busy machine slows both. Measured are --opens workspaces of each kind, one after another and then
--at_once at a time, and their memory while so many are open.
"""

from __future__ import annotations

import concurrent.futures
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import rich.console
import rich.table
from absl import flags

from benchmarks.results import hardware, save, scratch
from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.inside.world import PACKAGES, WORKSPACE
from rl_code.environment.sandbox.pool import Sandbox, SandboxConfig, SandboxPool
from rl_code.types import Layer, World

flags.DEFINE_integer("layer_mb", 320, "Megabytes of layers, of layers.", lower_bound=1)
flags.DEFINE_integer("opens", 200, "Workspaces opened of each kind, of layers.", lower_bound=2)
flags.DEFINE_integer("at_once", 32, "Workspaces opened at the same time, of layers.", lower_bound=1)

_FILE_BYTES = 64 << 10
_REPOSITORY_SHARE = 8  # one file of so many belongs to the repository
_TIMEOUT_S = 60.0


def main() -> None:
    console = rich.console.Console(width=100)
    with scratch("layers_") as place:
        place.chmod(0o755)
        report = measure(place)
    console.print(table(report))
    for name in ("bytes_shared", "files_shared", "build_s", "fork_ms", "pss_kb"):
        console.print(f"{name}: {report[name]}", highlight=False)
    save(report)


def measure(place: Path) -> dict:
    """Milliseconds of every opening by kind, and memory."""
    options = flags.FLAGS
    store = LayerStore(place / "store")
    start = time.monotonic()
    world = make_world(store, place / "files", options.layer_mb << 20)
    manifests = [store.manifest(layer.digest) for layer in world.layers]
    report = {
        "hardware": hardware(),
        "build_s": round(time.monotonic() - start, 1),
        "bytes_shared": sum(manifest.bytes for manifest in manifests),
        "files_shared": sum(manifest.entries for manifest in manifests),
    }
    with (
        SandboxPool(SandboxConfig()) as plain,
        SandboxPool(SandboxConfig(layers=str(store.folder))) as layered,
    ):
        kinds = {"bare": lambda: plain.open({}), "layers": lambda: layered.open({}, world)}
        report["times"] = {
            "one after another": take_turns(kinds, options.opens, 1),
            f"{options.at_once} at once": take_turns(kinds, options.opens, options.at_once),
        }
        report["pss_kb"] = {
            "bare": memory(plain, kinds["bare"], options.at_once),
            "layers": memory(layered, kinds["layers"], options.at_once),
        }
        report["fork_ms"] = fork_ms(layered, world)
    return report


def make_world(store: LayerStore, place: Path, size: int) -> World:
    """A world of random files with ``size`` bytes together."""
    numbers = random.Random(0)
    for number in range(-(-size // _FILE_BYTES)):
        kind = "packages" if number % _REPOSITORY_SHARE else "repository"
        file = place / kind / f"package_{number % 100}" / f"file_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(numbers.randbytes(_FILE_BYTES))
    layers = {"packages": PACKAGES, "repository": WORKSPACE}
    return World(tuple(Layer(folder.build(store, place / k), at) for k, at in layers.items()))


def take_turns(
    kinds: dict[str, Callable[[], Sandbox]], opens: int, at_once: int
) -> dict[str, dict[str, list[float]]]:
    """By kind and by what was waited for, milliseconds of each of ``opens`` workspaces."""
    found = {kind: {"open": [], "first command": []} for kind in kinds}

    def once(kind: str) -> None:
        start = time.perf_counter()
        with kinds[kind]() as sandbox:
            opened = time.perf_counter()
            done = sandbox.run(["true"], timeout_s=_TIMEOUT_S)
            assert done.exit_code == 0, done
            ended = time.perf_counter()
        found[kind]["open"].append(1000 * (opened - start))
        found[kind]["first command"].append(1000 * (ended - start))

    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        for kind in kinds:  # starts what is kept for later: keepers, and the page cache
            list(threads.map(once, [kind] * at_once))
            found[kind] = {name: [] for name in found[kind]}
        for _ in range(-(-opens // at_once)):
            for kind in kinds:
                list(threads.map(once, [kind] * at_once))
    return found


def memory(pool: SandboxPool, open_one: Callable[[], Sandbox], count: int) -> float:
    """Kilobytes of memory that each of ``count`` open workspaces adds; what processes share is
    divided among them.
    """
    used = []
    for number in (0, count):
        sandboxes = [open_one() for _ in range(number)]
        for sandbox in sandboxes:
            sandbox.run(["true"], timeout_s=_TIMEOUT_S)
        used.append(memory_kib(pool))
        for sandbox in sandboxes:
            sandbox.close()
    return round((used[1] - used[0]) / count, 1)


def memory_kib(pool: SandboxPool) -> float:
    """Kibibytes of a pool's processes; what they share is divided among those that share it."""
    workers = [psutil.Process(one.process.pid) for one in pool._sandboxes._workers]
    every = [one for worker in workers for one in (worker, *worker.children(recursive=True))]
    return sum(one.memory_full_info().pss for one in every) / 1024


def fork_ms(pool: SandboxPool, world: World) -> float:
    """Median milliseconds of a fork after 100 files were written."""
    times = []
    script = "for i in $(seq 100); do echo $i > file_$i; done; rm -r package_0"
    with pool.open({}, world) as sandbox:
        assert sandbox.run(["bash", "-c", script], timeout_s=_TIMEOUT_S).exit_code == 0
        for _ in range(20):
            start = time.perf_counter()
            pool.fork(sandbox).close()
            times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times), 1)


def table(report: dict) -> rich.table.Table:
    """Least, median and 95th percentile of each kind, in milliseconds."""
    shown = rich.table.Table("opened", "until", "kind", "least ms", "median ms", "p95 ms", "n")
    for how, kinds in report["times"].items():
        for until in ("open", "first command"):
            for kind, times in kinds.items():
                values = sorted(times[until])
                last = values[round(0.95 * (len(values) - 1))]
                row = (f"{one:.1f}" for one in (values[0], statistics.median(values), last))
                shown.add_row(how, until, kind, *row, str(len(values)))
    return shown
