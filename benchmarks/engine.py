"""Measures the inference engine alone: how near decoding comes to the speed of memory, and what
sharing prompts saves.

Every decode step reads all parameters once, and the keys and values of every row. The upper bound
of tokens per second is therefore the number of rows, times the bytes per second that all devices
read (measured in the same process), divided by the bytes of one step. To measure sharing, 8 prompts
of --prompt tokens with 8 episodes each are compared with 64 episodes that share no prompt.
"""

from __future__ import annotations

import statistics
import time

import jax
import rich.console
import rich.table
from absl import flags

from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode, prompts
from benchmarks.results import define_counts, hardware, save
from models.sharding import MeshConfig, make_mesh
from models.transformer import cast, parameter_count

define_counts("batches", ["1", "8", "64"], "Rows decoded together, of engine and speculation.")
flags.DEFINE_integer(
    "prompt", 1024, "Tokens of a prompt whose sharing is measured, of engine.", lower_bound=2
)
flags.DEFINE_integer(
    "completion", 64, "Tokens decoded a row, of engine and speculation.", lower_bound=1
)

GROUPS, SAMPLES = 8, 8


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=120)
    mesh = bench_model.all_devices()
    config = bench_model.model_config()
    rate = bench_model.memory_rate(mesh)
    report = dict(
        hardware=hardware(),
        model=options.model,
        dtype=config.dtype,
        memory_gb_per_s=round(rate / 1e9, 1),
        decode=[decode(config, int(batch), rate) for batch in options.batches],
        sharing=sharing(config),
    )
    console.print(decode_table(report))
    console.print(sharing_table(report))
    save(report)


def decode(config, batch: int, rate: float, prompt: int = 32, groups: int | None = None) -> dict:
    """Tokens per second of ``batch`` rows with short prompts, and what starts on a device.

    rate: bytes per second that all devices read. If there are fewer rows than devices, as many
    devices as rows are used. groups: different prompts, which divide the rows; one for each row if
    None.
    """
    options = flags.FLAGS
    devices = min(batch, len(jax.devices()))
    mesh = make_mesh(MeshConfig(data=devices, tensor=1))
    groups = batch if groups is None else groups
    engine = bench_model.engine_config(
        batch, groups, prompt, options.completion, devices, config.dtype
    )
    scheduler = bench_model.make_scheduler(config, engine, mesh)
    found = _play(scheduler, config, mesh, groups, samples=batch // groups, prompt=prompt)
    scheduler.close()
    parameters = parameter_count(config) * jax.numpy.dtype(config.dtype).itemsize
    keys = (
        2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim
        * jax.numpy.dtype(config.dtype).itemsize
    )
    read = batch * (prompt + options.completion / 2) * keys
    # Every device reads all parameters for its own rows. Virtual devices share one memory, whose
    # parameters could be read once, so the second bound counts them once.
    bound, once = (batch * rate / (read + copies * parameters) for copies in (devices, 1))
    return dict(batch=batch, devices=devices, bound_tokens_per_s=round(bound), **found) | {
        "share_of_bound": round(found["decoded_per_s"] / bound, 3),
        "share_if_read_once": round(found["decoded_per_s"] / once, 3),
    }


def sharing(config) -> dict:
    """The same number of episodes in groups of 8 that share a prompt, and alone."""
    options = flags.FLAGS
    mesh = bench_model.all_devices()
    found = {}
    for name, groups, samples in (("groups of 8", GROUPS, SAMPLES), ("alone", GROUPS * SAMPLES, 1)):
        rows = GROUPS * SAMPLES
        engine = bench_model.engine_config(
            rows, groups, options.prompt, options.completion, mesh.size, config.dtype
        )
        scheduler = bench_model.make_scheduler(config, engine, mesh)
        found[name] = _play(scheduler, config, mesh, groups, samples, options.prompt)
        scheduler.close()
    shared = found["groups of 8"]
    alone = found["alone"]
    gain = {
        f"gain_{part}": round(alone[f"{part}_s"] / shared[f"{part}_s"], 2)
        for part in ("total", "decode", "prefill")
    }
    return found | gain | {"gain_kv_bytes": round(alone["kv_mib"] / shared["kv_mib"], 2)}


def _play(scheduler, config, mesh, groups: int, samples: int, prompt: int) -> dict:
    """Medians over --repeats rollouts, after one that is not timed. Each has new prompts."""
    options = flags.FLAGS
    runs = []
    with jax.set_mesh(mesh):
        model = cast(bench_model.random_model(config, mesh, options.seed), config.dtype)
        for repeat in range(options.repeats + 1):
            tasks = prompts(groups, prompt, config.vocab_size, options.seed + repeat)
            start = time.perf_counter()
            _, stats = scheduler.rollout(
                model,
                tasks,
                lambda *a: FixedEpisode(*a, message=options.completion),
                group_size=samples,
                version=0,
                key=jax.random.key(options.seed),
            )
            runs.append((time.perf_counter() - start, stats))
    runs = runs[1:]
    stats = runs[-1][1]

    def median(value) -> float:
        return statistics.median(value(took, stats) for took, stats in runs)

    decode_s = median(lambda _, s: s.decode_s)
    prefill_s = median(lambda _, s: s.prefill_s)
    steps = stats.slot_steps / (scheduler.engine.shards * scheduler.engine.config.slots)
    dispatches = steps / scheduler.engine.config.decode_steps
    outside = median(lambda took, s: took - s.decode_s - s.prefill_s - s.wait_s)
    return dict(
        total_s=round(median(lambda took, _: took), 4),
        decode_s=round(decode_s, 4),
        prefill_s=round(prefill_s, 4),
        decoded_per_s=round(stats.sampled_tokens / decode_s),
        prefilled_per_s=round(stats.prefilled_tokens / prefill_s),
        occupancy=round(stats.occupancy, 3),
        prefix_hit_rate=round(stats.prefix_hit_rate, 3),
        kv_mib=round(stats.kv_bytes / 2**20, 2),
        tools_s=round(stats.wait_s, 4),
        step_ms=round(1e3 * decode_s / steps, 4),
        # of the host, in which no device works
        between_dispatches_ms=round(1e3 * max(0.0, outside) / dispatches, 3),
    )


def decode_table(report: dict) -> rich.table.Table:
    """The speed of decoding as a table, one line for each number of rows."""
    view = rich.table.Table(
        title=f"Decoding, {report['model']} in {report['dtype']}, memory read at "
        f"{report['memory_gb_per_s']} GB/s",
    )
    for name in (
        "rows",
        "devices",
        "tokens/s",
        "bound by reading",
        "share",
        "if devices read once",
        "occupancy",
    ):
        view.add_column(name, justify="right")
    for row in report["decode"]:
        share = f"{100 * row['share_of_bound']:.0f} %"
        cells = (
            row["batch"],
            row["devices"],
            f"{row['decoded_per_s']:,}",
            f"{row['bound_tokens_per_s']:,}",
            share,
        )
        view.add_row(
            *map(str, cells), f"{100 * row['share_if_read_once']:.0f} %", f"{row['occupancy']:.2f}"
        )
    return view


def sharing_table(report: dict) -> rich.table.Table:
    """Episodes that share prompts beside episodes that do not, as a table."""
    sharing = report["sharing"]
    view = rich.table.Table(title=f"64 episodes behind prompts of {flags.FLAGS.prompt} tokens")
    for name in (
        "",
        "seconds",
        "decoding",
        "prefill",
        "prefilled/s",
        "decoded/s",
        "found in cache",
        "keys, MiB",
    ):
        view.add_column(name, justify="right")
    for name in ("groups of 8", "alone"):
        row = sharing[name]
        hit = f"{100 * row['prefix_hit_rate']:.0f} %"
        speeds = (f"{row['prefilled_per_s']:,}", f"{row['decoded_per_s']:,}")
        times = (f"{row[key]:.2f}" for key in ("total_s", "decode_s", "prefill_s"))
        view.add_row(name, *times, *speeds, hit, f"{row['kv_mib']:.1f}")
    gains = (f"x {sharing[f'gain_{part}']}" for part in ("total", "decode", "prefill"))
    view.add_row("gain", *gains, "", "", "", f"x {sharing['gain_kv_bytes']}")
    return view
