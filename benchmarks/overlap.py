"""Compares updates in one phase and in two phases, with a wait in place of the rollouts.

In one phase, the update begins when the rollouts are finished. In two phases, the prompts are
computed while the rollouts go on. A sleep takes the place of the rollouts, as if tools, tests or
samplers on other devices were waited for. Rollouts on the learner's own cores would compete with
the update. The groups are those of rl_step's --workload.

Everything is measured a second time with rematerialisation, which keeps less between the phases. A
profile of one step of each kind tells in what share of the wait the devices worked. --trace keeps
the profile, for XProf or Perfetto.
"""

from __future__ import annotations

import dataclasses
import glob
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import model as bench_model
from benchmarks.episodes import random_groups
from benchmarks.results import hardware, save
from benchmarks.rl_step import PROMPTS, SAMPLES, WORKLOADS
from models.model_config import ModelConfig
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.two_phase import make_two_phase_update, residual_bytes
from rl_code.learner.two_phase_batching import pack_completions, pack_prompts
from rl_code.learner.update import init_state, make_update

flags.DEFINE_float("wait_s", 1.0, "Seconds that the rollouts of overlap take.", lower_bound=0.0)
flags.DEFINE_string("trace", None, "Folder for the profile of overlap.")

KINDS = ("one phase", "two phases")
# Whether the layers are computed again in the second phase (``ModelConfig.remat``).
RESIDUALS = {"everything kept": False, "rematerialised": True}
flags.DEFINE_multi_enum(
    "residuals", list(RESIDUALS), list(RESIDUALS), "What overlap keeps between the phases."
)
# The name of the wait in the profile.
_WAIT = "rollouts"


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=120)
    report = dict(
        hardware=hardware(), workload=options.workload, wait_s=options.wait_s, model=options.model
    )
    config = bench_model.model_config()
    report["rows"] = {
        name: measure(dataclasses.replace(config, remat=RESIDUALS[name]))
        for name in options.residuals
    }
    console.print(table(report))
    save(report)


def measure(config: ModelConfig) -> dict[str, float]:
    """Times --steps steps of each kind, in turns, after --warmup steps that are not timed.

    Returns medians: one_phase_s and two_phases_s (seconds of the wait and the update) and prompts_s
    (seconds of the first phase alone), each with its _range; residual_mib (memory that is kept
    between the phases); busy_one_phase and busy_two_phases (the share of the wait in which a device
    worked).
    """
    options = flags.FLAGS
    mesh = bench_model.all_devices()
    prompt, completion = WORKLOADS[options.workload]
    groups = random_groups(PROMPTS, SAMPLES, prompt, completion, config.vocab_size, options.seed)
    advantages = group_advantages(groups, GRPO())
    whole = PackConfig(PROMPTS, prompt + SAMPLES * (completion - 1), SAMPLES * completion, 0, False)
    apart = dataclasses.replace(whole, slots=SAMPLES * completion, prompt_slots=prompt)
    packed = pack_prompts([group.trajectories[0].tokens[:prompt] for group in groups], apart)
    batch, _ = pack(groups, advantages, whole, version=0)
    completions, _ = pack_completions(groups, advantages, packed, apart, version=0)
    batch, packed, completions = jax.device_put(
        (batch, packed, completions), NamedSharding(mesh, P("data"))
    )

    update = make_update(bench_model.LOSS, bench_model.OPTIMIZER, 1)
    prefill, finish = make_two_phase_update(bench_model.LOSS, bench_model.OPTIMIZER, 1)

    def one_phase(state):
        _wait()
        return update(state, batch)[0]

    def two_phases(state):
        begun = prefill(state.model, packed)
        _wait()
        return finish(state, begun, completions)[0]

    seconds: dict[str, list[float]] = {"one_phase_s": [], "two_phases_s": [], "prompts_s": []}
    with jax.set_mesh(mesh):
        state = init_state(
            bench_model.random_model(config, mesh, options.seed), bench_model.OPTIMIZER
        )
        for step in range(options.warmup + options.steps):
            state, first = _timed(one_phase, state)
            state, second = _timed(two_phases, state)
            begun, alone = _timed(lambda state: prefill(state.model, packed), state)
            kept = residual_bytes(begun) / 2**20
            del begun
            if step >= options.warmup:
                for name, value in zip(seconds, (first, second, alone), strict=True):
                    seconds[name].append(value)
        busy = {}
        for name, kind in zip(KINDS, (one_phase, two_phases), strict=True):
            state, busy["busy_" + name.replace(" ", "_")] = _profiled(name, kind, state)
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    spread = {
        f"{name}_range": [round(min(values), 3), round(max(values), 3)]
        for name, values in seconds.items()
    }
    return medians | spread | busy | {"residual_mib": round(kept, 1)}


def _wait() -> None:
    with jax.profiler.TraceAnnotation(_WAIT):
        time.sleep(flags.FLAGS.wait_s)


def _timed(step: Callable[[Any], Any], state: Any) -> tuple[Any, float]:
    """(the result of a step, the seconds until it was ready)."""
    start = time.perf_counter()
    result = jax.block_until_ready(step(state))
    return result, time.perf_counter() - start


# --- The profile ----------------------------------------------------------------------------------


def _profiled(name: str, step: Callable[[Any], Any], state: Any) -> tuple[Any, float]:
    """Profiles a step: (the state after it, the share of its wait in which a device worked)."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(flags.FLAGS.trace or scratch) / name.replace(" ", "_")
        with jax.profiler.trace(folder):
            state = jax.block_until_ready(step(state))
        (newest,) = sorted(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))[-1:]
        return state, round(_busy_share(jax.profiler.ProfileData.from_file(newest)), 3)


def _busy_share(profile: jax.profiler.ProfileData) -> float:
    """The share of the wait in which at least one device ran an operation of a program."""
    wait = None
    work = []
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == _WAIT:
                    wait = event.start_ns, event.start_ns + event.duration_ns
                elif any(key == "hlo_op" for key, _ in event.stats):
                    work.append((event.start_ns, event.start_ns + event.duration_ns))
    begin, end = wait
    inside = ((max(start, begin), min(stop, end)) for start, stop in work)
    return union_length((start, stop) for start, stop in inside if start < stop) / (end - begin)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, stop)."""
    total = 0.0
    reached = float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def table(report: dict) -> rich.table.Table:
    """The report as a table, one line for each entry of RESIDUALS."""
    view = rich.table.Table(
        title=f"{report['workload']}: {PROMPTS} x {SAMPLES} completions after a wait of "
        f"{report['wait_s']:g} s, "
        f"{report['model']}"
    )
    columns = (
        "",
        "one phase, s",
        "two phases, s",
        "prompts alone, s",
        "kept, MiB",
        "wait used in one",
        "in two",
    )
    for name in columns:
        view.add_column(name, justify="right")
    for name, row in report["rows"].items():
        view.add_row(
            name,
            *(
                f"{row[key]:.2f} [{row[f'{key}_range'][0]:.2f}, {row[f'{key}_range'][1]:.2f}]"
                for key in ("one_phase_s", "two_phases_s", "prompts_s")
            ),
            f"{row['residual_mib']:.0f}",
            *(f"{100 * row[f'busy_{name}']:.0f} %" for name in ("one_phase", "two_phases")),
        )
    return view
