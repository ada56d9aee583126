"""Compares training one step ahead with synchronous training.

One step ahead, the next groups are sampled during the update, so that the time in which tools run
is not lost. Schedule, store, weights, actor and update are those of training. Episodes have no
sandbox, and their tools only wait.

There are two arrangements. In the first, all devices both sample and learn, so only the tools'
waits can be hidden. In the second, half of the devices sample and the other half learns; a single
device has only the first. The waits are chosen so that sampling takes about as long as an update.
Then the two modes take turns, with --steps steps each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import statistics
import time
from pathlib import Path

import jax
import rich.console
import rich.table
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode, prompts
from benchmarks.results import hardware, save, scratch
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from rl_code.host.stop import StopRequest
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.update import init_state, make_update
from rl_code.rollout.actor import Actor
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.rollout.group_source import InActorThread, InLearnerThread
from rl_code.rollout.scheduler import Scheduler
from rl_code.schedule import Schedule
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.store import GroupStore
from rl_code.tasks.screening import TaskPool
from rl_code.types import Task
from rl_code.weights.layout import sampling_model
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import WeightsConfig

MODES = {"sync": 0, "one_step": 1}
GROUPS, SAMPLES, PROMPT, TURNS, MESSAGE, ANSWER = 8, 8, 512, 2, 8, 32
_WORK = WorkConfig(heartbeat_s=1.0, heartbeat_timeout_s=30.0, stall_s=300.0, deadline_s=600.0)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts that both modes use. ``mesh`` has the devices that learn, ``sampling_mesh`` those that
    sample.
    """

    scheduler: Scheduler
    update: object
    packing: PackConfig
    tasks: list[Task]
    mesh: Mesh
    sampling_mesh: Mesh


def main() -> None:
    console = rich.console.Console(width=110)
    with scratch("async_") as folder:
        report = measure(folder, console)
    console.print(table(report))
    save(report)


def measure(folder: Path, console: rich.console.Console) -> dict:
    """The numbers of each arrangement of the devices."""
    half = len(jax.devices()) // 2
    everything = bench_model.all_devices()
    found = {"shared": arrange(folder / "shared", console, everything, everything)}
    if half:
        learner, actor = (
            make_mesh(MeshConfig(half, 1), jax.devices()[at : at + half]) for at in (0, half)
        )
        found["apart"] = arrange(folder / "apart", console, learner, actor)
    config = bench_model.model_config()
    return dict(
        hardware=hardware(), model=flags.FLAGS.model, dtype=config.dtype, arrangements=found
    )


def arrange(folder: Path, console: rich.console.Console, mesh: Mesh, sampling_mesh: Mesh) -> dict:
    """Seconds of a step in both modes, and how long learner and actor were idle.

    mesh: the devices that learn. sampling_mesh: the devices that sample.
    """
    options = flags.FLAGS
    config = bench_model.model_config()
    after = TURNS * (MESSAGE + ANSWER)
    engine = bench_model.engine_config(
        GROUPS * SAMPLES, GROUPS, PROMPT, after, sampling_mesh.size, config.dtype
    )
    # Tools answer one by one. With these sizes a dispatch for few answers takes less time than one
    # for all.
    engine = dataclasses.replace(engine, decode_steps=MESSAGE, result_rows=16)
    parts = Parts(
        scheduler=bench_model.make_scheduler(
            config, engine, sampling_mesh, workers=GROUPS * SAMPLES
        ),
        update=make_update(bench_model.LOSS, bench_model.OPTIMIZER, 1),
        packing=PackConfig(GROUPS, PROMPT + SAMPLES * after, SAMPLES * TURNS * MESSAGE, 1, False),
        tasks=prompts(64, PROMPT, config.vocab_size, options.seed),
        mesh=mesh,
        sampling_mesh=sampling_mesh,
    )
    play = functools.partial(_play, parts, config)
    warm = play(folder / "warm", "sync", options.warmup + 2, 0.0)
    sampling, update = (min(warm[name][options.warmup :]) for name in ("sample", "update"))
    wait = max(0.0, (update - sampling) / TURNS)
    console.print(
        f"{folder.name}: sampling {sampling:.2f} s without tools, update {update:.2f} s: tools "
        f"wait {wait:.3f} s",
        style="dim",
    )
    found: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    for turn in range(options.repeats):
        for mode in MODES:
            console.print(
                f"{folder.name}, round {turn + 1} of {options.repeats}: {mode}", style="dim"
            )
            steps = play(folder / f"{mode}_{turn}", mode, options.steps + options.warmup, wait)
            for name, values in steps.items():
                found[mode].setdefault(name, []).extend(values[options.warmup :])
    parts.scheduler.close()
    modes = {
        mode: {name: statistics.median(values) for name, values in steps.items()}
        for mode, steps in found.items()
    }
    spread = {mode: [min(steps["step"]), max(steps["step"])] for mode, steps in found.items()}
    speedup = round(modes["sync"]["step"] / modes["one_step"]["step"], 3)
    return dict(tool_wait_s=round(wait, 4), modes=modes, spread=spread, speedup=speedup)


def _play(
    parts: Parts, config, folder: Path, mode: str, steps: int, wait: float
) -> dict[str, list[float]]:
    """Trains a new model for some steps.

    wait: mean seconds of a tool. Returns for each step: its seconds, the seconds in which the
    learner waited for groups ("sample"), those of the update, and the shares of the step in which
    learner and actor were idle.
    """
    bound = MODES[mode]
    asynchrony = AsynchronyConfig(
        mode, bound, False, _WORK, WeightsConfig(full_every=1, keep=2, deadline_s=60.0)
    )
    folder.mkdir(parents=True)
    store = GroupStore(folder, "learner")
    own = GroupStore(folder, "actor")
    weights = _weights(
        folder, asynchrony, sampling_model(config, config.dtype, parts.sampling_mesh)
    )
    episode = functools.partial(
        FixedEpisode, message=MESSAGE, turns=TURNS, answer=ANSWER, tool_s=_tool(wait)
    )
    actor = Actor(
        parts.scheduler, own, Claims(own, _WORK), weights, parts.tasks, episode, asynchrony
    )
    deadline = _WORK.deadline_s
    stop = StopRequest()
    source = (
        InActorThread(store, actor, deadline, stop)
        if bound
        else InLearnerThread(store, actor, deadline)
    )
    pool = TaskPool(len(parts.tasks), flags.FLAGS.seed, None, None)
    counts = dict(steps=steps, next_step=0, tasks_per_step=GROUPS, group_size=SAMPLES, samples=0)
    schedule = Schedule(
        asynchrony,
        store,
        pool,
        **counts,
        first_group=lambda step: step * GROUPS,
        seed=flags.FLAGS.seed,
    )
    rows = NamedSharding(parts.mesh, P("data"))
    taken: dict[str, list[float]] = {
        name: [] for name in ("step", "sample", "update", "learner_idle", "actor_idle")
    }
    with jax.set_mesh(parts.mesh), source, contextlib.closing(weights):
        state = init_state(
            bench_model.random_model(config, parts.mesh, flags.FLAGS.seed), bench_model.OPTIMIZER
        )
        weights.publish(0, state.model)
        for step in range(steps):
            begin = time.perf_counter()
            schedule.plan(step, source.wait)
            records = source.wait(step)
            sampled = time.perf_counter()
            groups = [record.group for record in records]
            advantages = group_advantages(groups, GRPO())
            batch, _ = pack(groups, advantages, parts.packing, version=step)
            state, metrics = parts.update(state, jax.device_put(batch, rows))
            jax.device_get(metrics)
            version = weights.publish(step + 1, state.model)
            store.consume(step, records, version=step, weights=version.checksum)
            done = time.perf_counter()
            values = (
                done - begin,
                sampled - begin,
                done - sampled,
                (sampled - begin) / (done - begin),
            )
            for name, value in zip(taken, (*values, source.take_stats().idle_share), strict=True):
                taken[name].append(value)
    return taken


def _weights(folder: Path, asynchrony: AsynchronyConfig, abstract: Transformer) -> LocalWeights:
    """The weights as training hands them on: one step ahead every version is also stored."""
    if asynchrony.mode == "sync":
        return LocalWeights(abstract, keep=2)
    publisher = StoredPublisher(folder, abstract.config.dtype, asynchrony.weights)
    subscriber = StoredSubscriber(folder, abstract, name="actor")
    return LocalWeights(abstract, keep=2, stored=(publisher, subscriber))


def _tool(wait: float):
    """The seconds of each tool call: ``wait``, up to a half more or less, the same in every run."""

    def seconds(group: int, index: int, message: int) -> float:
        return wait * random.Random(f"{group}/{index}/{message}").uniform(0.5, 1.5)

    return seconds


def table(report: dict) -> rich.table.Table:
    """The report as a table, one line for each arrangement and mode."""
    arrangements = report["arrangements"]
    ahead = ", ".join(f"{found['speedup']:.2f} {name}" for name, found in arrangements.items())
    view = rich.table.Table(
        title=f"{GROUPS} x {SAMPLES} episodes of {TURNS} turns, {report['model']} in "
        f"{report['dtype']}",
        caption="one step ahead is this many times as fast as synchronous on the same devices: "
        f"{ahead}",
    )
    columns = (
        "devices",
        "tools wait, s",
        "mode",
        "seconds a step [range]",
        "for groups",
        "update",
        "learner idle",
    )
    for name in (*columns, "actor idle"):
        view.add_column(name, justify="right")
    for name, found in arrangements.items():
        for mode, row in found["modes"].items():
            low, high = found["spread"][mode]
            view.add_row(
                name,
                f"{found['tool_wait_s']:.2f}",
                mode,
                f"{row['step']:.2f} [{low:.2f}, {high:.2f}]",
                *(f"{row[name]:.2f}" for name in ("sample", "update")),
                *(f"{100 * row[name]:.0f} %" for name in ("learner_idle", "actor_idle")),
            )
    return view
