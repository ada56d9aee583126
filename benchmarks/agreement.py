"""Differences between the log-probabilities that a sampler noted and those of the trainer, model by
model, in float32 and in bfloat16.

Every model is a folder, as ``model.weights`` takes it (--folders). The engine samples groups of
episodes with several messages at temperature 1, from random prompts, and the trainer computes the
same tokens in packed rows with shared prompts. In float32 both compute in it; in bfloat16 both do,
and the sampler has its weights in it too, as a run with ``model.dtype="bfloat16"`` does. Keys that
an indexer chooses, and experts, are each side's own choice, as without ``rollout.picks``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode, prompts
from benchmarks.results import save
from models import pretrained
from models.sharding import MeshConfig, make_mesh
from models.transformer import cast
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.logprobs import batch_logprobs

flags.DEFINE_list("folders", [], "Of agreement: the folders of models.")

DTYPES = ("float32", "bfloat16")
GROUPS, SAMPLES = 4, 4
# Tokens of a prompt, of a message, of the answer to one, and messages of an episode.
PROMPT, MESSAGE, ANSWER, TURNS = 32, 8, 4, 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A model in one dtype."""

    folder: str
    dtype: str
    # Sampled tokens, and the mean and the largest absolute difference of their log-probabilities.
    tokens: int
    mean: float
    largest: float
    # The mean log-probability, by the trainer.
    logprob: float


def main() -> None:
    folders = [Path(folder) for folder in flags.FLAGS.folders]
    if not folders:
        raise flags.IllegalFlagValueError("--folders: name the folders of models")
    rows = []
    for folder in folders:
        for dtype in DTYPES:
            rows.append(measure(folder, dtype, flags.FLAGS.seed))
            save(dict(rows=[dataclasses.asdict(row) for row in rows]))
    # no borders, so that a page can take the table as it is
    rich.console.Console(width=200).print(markdown(rows), soft_wrap=True)


def measure(folder: Path, dtype: str, seed: int) -> Row:
    """One row of the table. Raises what ``pretrained`` does for a folder that cannot be read."""
    mesh = make_mesh(MeshConfig(data=1, tensor=1), jax.devices()[:1])
    config = dataclasses.replace(pretrained.read_config(folder), dtype=dtype)
    after = TURNS * (MESSAGE + ANSWER)
    engine = bench_model.engine_config(GROUPS * SAMPLES, GROUPS, PROMPT, after, 1, dtype)
    scheduler = bench_model.make_scheduler(config, engine, mesh)
    with jax.set_mesh(mesh):
        model = pretrained.load(folder, config, mesh)
        groups, _ = scheduler.rollout(
            cast(model, dtype),
            prompts(GROUPS, PROMPT, config.vocab_size, seed),
            _episode,
            group_size=SAMPLES,
            version=0,
            key=jax.random.key(seed),
        )
        scheduler.close()
        packing = PackConfig(
            rows=GROUPS,
            slots=-(-(PROMPT + SAMPLES * after) // 64) * 64,
            targets=SAMPLES * TURNS * MESSAGE,
            drop_uninformative=False,
            runs=SAMPLES + 1,
        )
        credit: Any = GRPO()
        batch, _ = pack(groups, group_advantages(groups, credit), packing, version=0)
        compute = jax.jit(lambda model, batch: batch_logprobs(model, batch, 1.0, runs=packing.runs))
        logprobs = np.asarray(compute(model, batch)[0])
    real = batch.mask > 0
    apart = np.abs(logprobs - batch.logprobs)[real]
    mean, largest = float(apart.mean()), float(apart.max())
    of_trainer = float(logprobs[real].mean())
    return Row(folder.name, dtype, int(real.sum()), mean, largest, of_trainer)


def _episode(*given: Any) -> Any:
    return FixedEpisode(*given, message=MESSAGE, turns=TURNS, answer=ANSWER)


def markdown(rows: list[Row]) -> str:
    """The table of docs/own_model.md: one line for each model."""
    by_folder: dict[str, list[Row]] = {}
    for row in rows:
        by_folder.setdefault(row.folder, []).append(row)
    columns = ["model", "tokens", *(f"{dtype}: mean, largest" for dtype in DTYPES), "mean log p"]
    lines = [columns, ["---"] * len(columns)]
    for folder, found in by_folder.items():
        apart = [f"{row.mean:.1e}, {row.largest:.1e}" for row in found]
        lines.append([folder, str(found[0].tokens), *apart, f"{found[0].logprob:.2f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
