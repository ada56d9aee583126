"""Measures what guessing the next tokens gains (``rl_code.rollout.drafts``), with and without it in
turns in one run, so that both have the same share of a busy machine. The tokens must be the same.

Two texts of a model with random weights, by number of rows:

- "quotes a file": each prompt is a file, and each answer quotes it, as an agent's turn that edits a
  file does. The weights are made so that a token of the file is followed by its next one with a
  probability of about 0.96, and else by any other place of the file, from which the quote goes on.
- "does not repeat": the weights are random, so that no guess is right. It shows what guesses cost.

With --played=<workdir> also the tasks of the run's first suite, played by its newest model: that of
``launch.sft`` or ``launch.train``. Every round has other tasks.
"""

from __future__ import annotations

import dataclasses
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
from benchmarks.results import hardware, save
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer, abstract_model, cast
from rl_code import checkpoint, sft
from rl_code.recording import kept_config
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.stats import RolloutStats
from rl_code.run import Run
from rl_code.types import Group, Task, Tests

flags.DEFINE_list("drafts", ["4"], "Tokens guessed at once, of speculation.")
flags.DEFINE_integer("quoted", 256, "Tokens of the file that is quoted, of speculation.", 2)
flags.DEFINE_string("played", None, "Workdir of a run whose tasks are played too, of speculation.")

# How much likelier the next token of the file is than all others of it together.
_ODDS = 25.0
# Tasks of a round of --played.
_TASKS = 16

# Plays a round with so many guesses: (what was sampled, the counts, seconds).
Play = Callable[[int, int], tuple[list[Group], RolloutStats, float]]


def main() -> None:
    options = flags.FLAGS
    drafts = [int(count) for count in options.drafts]
    config = dataclasses.replace(bench_model.model_config(), tied_embeddings=False)
    rows = []
    for batch in map(int, options.batches):
        for name in ("quotes a file", "does not repeat"):
            rows += random_text(name, config, batch, drafts)
    if options.played:
        rows += run_tasks(Path(options.played), drafts)
    report = dict(hardware=hardware(), model=options.model, dtype=config.dtype, rows=rows)
    rich.console.Console(width=120).print(table(report))
    save(report)


def random_text(name: str, config: ModelConfig, batch: int, drafts: Sequence[int]) -> list[dict]:
    """One of the two texts, decoded in ``batch`` rows; a row of numbers for each of ``drafts``."""
    options = flags.FLAGS
    mesh = make_mesh(MeshConfig(data=min(batch, len(jax.devices())), tensor=1))
    rng = np.random.default_rng(options.seed)
    file = rng.permutation(config.vocab_size)[: options.quoted]
    engine = bench_model.engine_config(
        batch, batch, options.quoted, options.completion, mesh.size, config.dtype
    )
    schedulers = {
        count: bench_model.make_scheduler(
            config, dataclasses.replace(engine, draft_tokens=count), mesh
        )
        for count in (0, *drafts)
    }
    with jax.set_mesh(mesh):
        model = bench_model.random_model(config, mesh, options.seed)
        if name == "quotes a file":
            model = jax.jit(quoting)(model, jnp.asarray(file))
        model = cast(model, config.dtype)

        def play(count: int, number: int):
            tasks = [
                task(f"{number}/{row}", np.roll(file, -int(shift)))
                for row, shift in enumerate(rng_of(number).integers(0, len(file), batch))
            ]
            return timed(
                schedulers[count],
                model,
                tasks,
                lambda *a: FixedEpisode(*a, message=options.completion),
                group_size=1,
            )

        found = compare(play, drafts)
    for scheduler in schedulers.values():
        scheduler.close()
    return [dict(text=name, slots=batch, **row) for row in found]


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


def run_tasks(workdir: Path, drafts: Sequence[int]) -> list[dict]:
    """Tasks of a run's first suite; a row of numbers for each of ``drafts``."""
    config = kept_config.read(workdir)
    suite = config.suites[0]
    engine = suite.engine or config.rollout.engine
    with Run(config, workdir) as run, jax.set_mesh(run.mesh):
        model = run.sampler(newest(run, workdir), suite.dtype)
        tasks = run.suite_tasks(suite)

        def play(count: int, number: int):
            first = number * _TASKS % max(1, len(tasks) - _TASKS + 1)
            own = dataclasses.replace(engine, draft_tokens=count)
            scheduler = run.scheduler(suite.sampling, own, suite.protocol, suite.dtype)
            part = tasks[first : first + _TASKS]
            return timed(scheduler, model, part, run.episode, group_size=suite.samples)

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


def compare(play: Play, drafts: Sequence[int]) -> list[dict]:
    """Plays --repeats rounds, after one that is not timed, each with every number of guesses."""
    seconds: dict[int, list[tuple[float, float]]] = {count: [] for count in (0, *drafts)}
    stats: dict[int, RolloutStats] = {}
    different = dict.fromkeys(drafts, 0)
    for number in range(flags.FLAGS.repeats + 1):
        groups: dict[int, list[Group]] = {}
        for count in (0, *drafts):
            groups[count], stats[count], took = play(count, number)
            seconds[count].append((stats[count].decode_s, took))
        for count in drafts:
            different[count] += differing(groups[0], groups[count])
    return [
        dict(
            drafts=count,
            tokens_per_s=round(stats[0].sampled_tokens / seconds[0][-1][0]),
            drafted_tokens_per_s=round(stats[count].sampled_tokens / seconds[count][-1][0]),
            accepted=round(stats[count].draft_acceptance, 3),
            tokens_per_step=round(stats[count].tokens_per_row_step, 2),
            decode_gain=_ratios(seconds[0], seconds[count], 0),
            whole_gain=_ratios(seconds[0], seconds[count], 1),
            different_trajectories=different[count],
        )
        for count in drafts
    ]


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


def rng_of(number: int) -> np.random.Generator:
    """Random numbers of a round."""
    return np.random.default_rng([flags.FLAGS.seed, number])


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
    names = ("text", "rows", "guessed", "tokens/s", "with", "right", "tokens a step")
    for name in (*names, "decoding", "all", "trajectories that differ"):
        view.add_column(name, justify="left" if name == "text" else "right")
    for row in report["rows"]:
        gains = (
            "x {:.2f} [{:.2f}, {:.2f}]".format(*row[name]) for name in ("decode_gain", "whole_gain")
        )
        view.add_row(
            row["text"],
            str(row["slots"]),
            str(row["drafts"]),
            f"{row['tokens_per_s']:,}",
            f"{row['drafted_tokens_per_s']:,}",
            f"{100 * row['accepted']:.0f} %",
            f"{row['tokens_per_step']:.2f}",
            *gains,
            str(row["different_trajectories"]),
        )
    return view
