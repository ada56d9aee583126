"""Measures what guessing the next tokens gains (``rl_code.rollout.drafts``), with and without it in
turns in one run, so that both have the same share of a busy machine. The tokens must be the same.

Two texts of a model with random weights, by number of rows:

- "quotes a file": each prompt is a file, and each answer quotes it, as an agent's turn that edits a
  file does. The weights are made so that a token of the file is followed by its next one with a
  probability of about 0.96, and else by any other place of the file, from which the quote goes on.
- "does not repeat": the weights are random, so that no guess is right. It shows what guesses cost.

Guesses are made always, or with --least only in rows whose text repeats itself
(``EngineConfig.draft_least``). CPU seconds are those of the process: on a machine that is shared
with other work they swing less than the time that passes.

From the same numbers follows what a step with guesses costs, in steps without, and from which
probability of a guess on they pay: the value for ``draft_least``. It is set by hand and not while
decoding, because a row must meet the same programs when it is sampled again, whatever the machine
is busy with.

With --played=<workdir> also the tasks of the run's first suite, played by its newest model: that of
``launch.sft`` or ``launch.train``. Every round has other tasks.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode
from benchmarks.results import define_counts, hardware, save
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer, abstract_model, cast
from rl_code import sft
from rl_code.checkpoint import checkpoint
from rl_code.recording import kept_config
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.stats import RolloutStats
from rl_code.run.run import Run
from rl_code.types import Group, Task, Tests

define_counts("drafts", ["4"], "Tokens guessed at once, of speculation.")
flags.DEFINE_list(
    "least",
    ["0", "0.5"],
    "Of speculation, the shares of a row's tokens that must repeat for its next to be guessed.",
)
flags.DEFINE_integer("quoted", 256, "Tokens of the file that is quoted, of speculation.", 2)
flags.DEFINE_string("played", None, "Workdir of a run whose tasks are played too, of speculation.")

# How much likelier the next token of the file is than all others of it together.
_ODDS = 25.0
# Tasks of a round of --played.
_TASKS = 16

# How tokens are guessed: (``EngineConfig.draft_tokens``, ``draft_least``).
Guessing = tuple[int, float]
WITHOUT: Guessing = (0, 0.0)

# Plays a round, of that number: (what was sampled, the counts, seconds).
Play = Callable[[Guessing, int], tuple[list[Group], RolloutStats, float]]


def main() -> None:
    options = flags.FLAGS
    drafts = [(int(count), float(least)) for count in options.drafts for least in options.least]
    config = dataclasses.replace(bench_model.model_config(), tied_embeddings=False)
    rows = []
    for batch in map(int, options.batches):
        for name in ("quotes a file", "does not repeat"):
            rows += random_text(name, config, batch, drafts)
    if options.played:
        rows += run_tasks(Path(options.played), drafts)
    report = dict(hardware=hardware(), model=options.model, dtype=config.dtype, rows=rows)
    rich.console.Console(width=170).print(table(report))
    save(report)


def random_text(
    name: str, config: ModelConfig, batch: int, drafts: Sequence[Guessing]
) -> list[dict]:
    """One of the two texts, decoded in ``batch`` rows; a row of numbers for each of ``drafts``."""
    options = flags.FLAGS
    mesh = make_mesh(MeshConfig(data=min(batch, len(jax.devices())), tensor=1))
    rng = np.random.default_rng(options.seed)
    file = rng.permutation(config.vocab_size)[: options.quoted]
    engine = bench_model.engine_config(
        batch, batch, options.quoted, options.completion, mesh.size, config.dtype
    )
    schedulers = {
        way: bench_model.make_scheduler(config, guessing(engine, way), mesh)
        for way in (WITHOUT, *drafts)
    }
    with jax.set_mesh(mesh):
        model = bench_model.random_model(config, mesh, options.seed)
        if name == "quotes a file":
            model = jax.jit(quoting)(model, jnp.asarray(file))
        model = cast(model, config.dtype)

        def play(way: Guessing, number: int):
            shifts = np.random.default_rng([options.seed, number]).integers(0, len(file), batch)
            tasks = [
                task(f"{number}/{row}", np.roll(file, -int(shift)))
                for row, shift in enumerate(shifts)
            ]
            return timed(
                schedulers[way],
                model,
                tasks,
                lambda *a: FixedEpisode(*a, message=options.completion),
                group_size=1,
            )

        found = compare(play, drafts)
    for scheduler in schedulers.values():
        scheduler.close()
    return [dict(text=name, slots=batch, **row) for row in found]


def guessing(engine: EngineConfig, way: Guessing) -> EngineConfig:
    """An engine's shapes, with tokens guessed in some way."""
    return dataclasses.replace(engine, draft_tokens=way[0], draft_least=way[1])


def quoting(model: Transformer, file: jax.Array) -> Transformer:
    """The model with weights by which a token of ``file`` is followed by its next one there.

    Layers add little to a token's embedding, and the unembedding of a token is the embedding of the
    one before it. Tokens outside of the file are never sampled.
    """
    size = model.config.embed_dim
    count = file.shape[0]
    embeddings = jax.random.normal(jax.random.key(1), model.embed.table[...].shape)
    # Along one direction all tokens are equal. Those outside of the file are given logits far below
    # 0 by it.
    embeddings = embeddings.at[:, 0].set(size**0.5)
    embeddings *= size**0.5 / jnp.linalg.norm(embeddings, axis=1, keepdims=True)
    outside = jnp.zeros(size).at[0].set(-60.0 / size**0.5)
    # half of an embedding's square is along that direction, the other half is its own
    before = embeddings[jnp.roll(file, 1)].at[:, 0].set(0.0)
    own = 2 * jnp.log(_ODDS * count) / size * before
    unembed = jnp.broadcast_to(outside, embeddings.shape).at[file].set(own)
    layers = model.layers
    layers.o[...] = 0.02 * layers.o[...]
    layers.down[...] = 0.02 * layers.down[...]
    model.embed.table[...] = embeddings.astype(model.embed.table.dtype)
    model.unembed[...] = unembed.T.astype(model.unembed.dtype)
    return model


def run_tasks(workdir: Path, drafts: Sequence[Guessing]) -> list[dict]:
    """Tasks of a run's first suite; a row of numbers for each of ``drafts``."""
    config = kept_config.read(workdir)
    suite = config.suites[0]
    engine = suite.engine or config.rollout.engine
    with Run(config, workdir) as run, jax.set_mesh(run.mesh):
        episode = functools.partial(run.episode, protocol=suite.protocol, limits=suite.limits)
        model = run.sampler(newest(run, workdir), suite.dtype)
        tasks = run.task_sets.of_suite(suite)

        schedulers = {
            way: run.scheduler(suite.sampling, guessing(engine, way), suite.protocol, suite.dtype)
            for way in (WITHOUT, *drafts)
        }

        def play(way: Guessing, number: int):
            first = number * _TASKS % max(1, len(tasks) - _TASKS + 1)
            part = tasks[first : first + _TASKS]
            return timed(schedulers[way], model, part, episode, group_size=suite.samples)

        found = compare(play, drafts)
    name = f"suite {suite.name} of {workdir.name}"
    return [dict(text=name, slots=run.mesh.size * engine.slots, **row) for row in found]


def newest(run: Run, workdir: Path) -> Transformer:
    """The model of the newest checkpoint of a run, or that of its warm start."""
    if not checkpoint.steps(workdir):
        return sft.initial_model(run)
    model = abstract_model(run.model_config, run.mesh)
    return checkpoint.load(workdir, {"model": model}, step=None, partial=True).state["model"]


def timed(
    scheduler: Scheduler, model: Transformer, tasks: Sequence[Task], make_episode, group_size: int
) -> tuple[list[Group], RolloutStats, float]:
    start = time.perf_counter()
    groups, stats = scheduler.rollout(
        model,
        tasks,
        make_episode,
        group_size=group_size,
        version=0,
        key=jax.random.key(flags.FLAGS.seed),
    )
    return groups, stats, time.perf_counter() - start


def compare(play: Play, drafts: Sequence[Guessing]) -> list[dict]:
    """Plays --repeats rounds, after one that is not timed, each with every way of guessing."""
    seconds: dict[Guessing, list[tuple[float, ...]]] = {way: [] for way in (WITHOUT, *drafts)}
    stats: dict[Guessing, RolloutStats] = {}
    different = dict.fromkeys(drafts, 0)
    for number in range(flags.FLAGS.repeats + 1):
        groups: dict[Guessing, list[Group]] = {}
        for way in seconds:
            start = time.process_time()
            groups[way], stats[way], took = play(way, number)
            worked = time.process_time() - start
            seconds[way].append((stats[way].decode_s, took, worked))
        for way in drafts:
            different[way] += differing(groups[WITHOUT], groups[way])
    found = [
        dict(
            drafts=way[0],
            least=way[1],
            tokens_per_s=round(stats[WITHOUT].sampled_tokens / seconds[WITHOUT][-1][0]),
            drafted_tokens_per_s=round(stats[way].sampled_tokens / seconds[way][-1][0]),
            accepted=round(stats[way].draft_acceptance, 3),
            tokens_per_step=round(stats[way].tokens_per_row_step, 2),
            decode_gain=_ratios(seconds[WITHOUT], seconds[way], 0),
            whole_gain=_ratios(seconds[WITHOUT], seconds[way], 1),
            cpu_gain=_ratios(seconds[WITHOUT], seconds[way], 2),
            different_trajectories=different[way],
        )
        for way in drafts
    ]
    for row in found:
        cost = row["tokens_per_step"] / row["decode_gain"][0]
        row |= dict(step_cost=round(cost, 2), pays_from=round(break_even(cost, row["drafts"]), 2))
    return found


def break_even(cost: float, drafts: int) -> float:
    """The probability of each guess from which on guesses pay; infinite where they never do.

    cost: of a step with guesses, in steps without. drafts: guesses of a step.
    """

    def tokens(right: float) -> float:
        """Tokens that a step is expected to bring: a guess counts if those before it were right."""
        return sum(right**count for count in range(drafts + 1))

    if tokens(1.0) < cost:
        return float("inf")
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if tokens(middle) >= cost else (middle, high)
    return high


def differing(these: Sequence[Group], those: Sequence[Group]) -> int:
    """Trajectories whose tokens are not the same."""
    return sum(
        not np.array_equal(x.tokens, y.tokens)
        for a, b in zip(these, those, strict=True)
        for x, y in zip(a.trajectories, b.trajectories, strict=True)
    )


def _ratios(without, with_drafts, at: int) -> list[float]:
    """[median, least, most] over the rounds of how many times faster it is with drafts."""
    rounds = zip(without[1:], with_drafts[1:], strict=True)
    found = [one[at] / other[at] for one, other in rounds]
    return [round(x, 2) for x in (statistics.median(found), min(found), max(found))]


def task(name: str, tokens: np.ndarray) -> Task:
    """A task whose prompt is these tokens."""
    none = Tests()
    return Task(name, (), {}, "", "", none, none, {}, meta={"tokens": tokens.tolist()})


def table(report: dict) -> rich.table.Table:
    """One line for each text, number of rows and number of guesses."""
    view = rich.table.Table(
        title=f"Guessing the next tokens, {report['model']} in {report['dtype']}; gains: median "
        "\\[range] of rounds with and without in turns"
    )
    names = ("text", "rows", "guessed", "from", "tokens/s", "with", "right", "tokens a step")
    gained = ("decoding", "all", "CPU seconds")
    for name in (*names, *gained, "a step costs", "pays from", "trajectories that differ"):
        view.add_column(name, justify="left" if name == "text" else "right")
    for row in report["rows"]:
        gains = (
            "x {:.2f} [{:.2f}, {:.2f}]".format(*row[name])
            for name in ("decode_gain", "whole_gain", "cpu_gain")
        )
        view.add_row(
            row["text"],
            str(row["slots"]),
            str(row["drafts"]),
            f"{100 * row['least']:.0f} %",
            f"{row['tokens_per_s']:,}",
            f"{row['drafted_tokens_per_s']:,}",
            f"{100 * row['accepted']:.0f} %",
            f"{row['tokens_per_step']:.2f}",
            *gains,
            f"{row['step_cost']:.2f}",
            "never" if row["pays_from"] > 1 else f"{100 * row['pays_from']:.0f} %",
            str(row["different_trajectories"]),
        )
    return view
