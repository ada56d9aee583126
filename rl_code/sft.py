"""Supervised warm start: next-token training on demonstrations, on the tokens that the demonstrator
chose.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax

from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config import read_config
from rl_code.environment.documents import place
from rl_code.host.stop import Stopped, StopRequest
from rl_code.learner.row_slots import cut_documents
from rl_code.learner.supervised_batching import Demonstrated, SupervisedBatch, pack_supervised
from rl_code.learner.update import TrainState, init_state, make_sft_update, next_token_loss
from rl_code.metrics.progress import Progress
from rl_code.metrics.writers import MetricLog
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import MAY_CHANGE
from rl_code.tasks.demonstrations import Segment

FOLDER = "sft"
# Keys of a config on which no warm start depends: runs that differ in nothing else may share one.
# Summaries and notes are made in episodes, which a warm start has none of.
MAY_DIFFER = (
    *MAY_CHANGE,
    "train",
    "rollout",
    "reward",
    "sandbox",
    "asynchrony",
    "summaries",
    "memory",
)


def may_differ(config: RunConfig) -> tuple[str, ...]:
    """MAY_DIFFER, and the training tasks where the demonstrations have tasks of their own."""
    return (*MAY_DIFFER, *(("tasks",) if config.demonstrated()[0] != "tasks" else ()))


class Demonstrations:
    """Endless token examples by number: the configured demonstrations, gone through again and
    again; with ``held_out`` those of held-out tasks.
    """

    def __init__(self, run: Run, *, held_out: bool = False):
        self._run = run
        self._count = run.config.sft.held_out if held_out else run.config.sft.demonstrations
        self._show = run.demonstrations.held_out if held_out else run.demonstrations.numbered
        self._decisive = _tokens(run.tokenizer, run.config.sft.decisive)
        self._known: dict[int, Demonstrated] = {}

    def _example(self, index: int) -> Demonstrated:
        if index in self._known:
            return self._known[index]
        run = self._run
        documents = run.config.documents
        tokens: list[int] = []
        weights: list[float] = []
        kinds: list[int] = []
        for segment in self._show(index):
            piece = run.tokenizer.encode(segment.text)
            if documents is not None:
                number = max([0, *kinds])
                pad = run.tokenizer.pad_id
                piece, more = place(
                    [(piece, segment.document)], len(tokens), number, documents, pad
                )
                kinds += more
            tokens += piece
            weights += self._weights(segment, piece)
        example = Demonstrated(tokens, weights, None if documents is None else kinds)
        self._known[index] = example.cut(run.config.sft.slots)
        return self._known[index]

    def _weights(self, segment: Segment, tokens: list[int]) -> list[float]:
        """The weight of each token of a segment."""
        sft = self._run.config.sft
        if not segment.learned:
            return [0.0] * len(tokens)
        if not segment.sampled:
            return [sft.weight_of_read] * len(tokens)
        return [sft.weight_of_decisive if one in self._decisive else 1.0 for one in tokens]

    def after(self, position: int) -> Iterator[Demonstrated]:
        """The examples from number ``position`` on."""
        while True:
            yield self._example(position % self._count)
            position += 1

    def batch(self, position: int) -> tuple[SupervisedBatch, int]:
        """A packed batch of examples from ``position`` on, and the position after it."""
        documents = self._run.config.documents
        rows, slots = self._shape(position)
        batch, taken = pack_supervised(
            self.after(position),
            rows=rows,
            slots=slots,
            align=self._run.model_config.alignment,
            longest=0 if documents is None else documents.longest,
            parts=self._run.config.mesh.context or 1,
        )
        return batch, position + taken

    def counts(self, batch: SupervisedBatch) -> dict[str, float]:
        """Metrics of a packed batch: as those of ``batching.pack``, where rows of documents are
        cut.
        """
        config = self._run.config
        parts = config.mesh.context or 1
        if config.documents is None or parts == 1:
            return {}
        return {"pack/documents_cut": float(cut_documents(batch.where, parts))}

    def _shape(self, position: int) -> tuple[int, int]:
        """Rows and slots of the batch from ``position`` on: as many slots as configured in all, in
        the shortest rows that hold every example.
        """
        config = self._run.config.sft
        rows, slots, least = config.rows, config.slots, config.least_slots
        if least is None:
            return rows, slots
        total, longest = 0, 0
        for example in self.after(position):
            total += len(example.tokens)
            longest = max(longest, len(example.tokens))
            if total >= rows * slots:
                break
        parts = self._run.config.mesh.context or 1
        while slots % (2 * parts) == 0 and slots // 2 >= max(longest, least):
            rows *= 2
            slots //= 2
        return rows, slots


def _tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> frozenset[int]:
    """The tokens with these texts. Raises ConfigError where a text is not one token."""
    found = {text: tokenizer.encode(text) for text in texts}
    for text, tokens in found.items():
        if len(tokens) != 1:
            raise read_config.ConfigError(
                f"config.sft.decisive has {text!r}, which the tokenizer cuts into {len(tokens)} "
                "tokens; name texts that are one token each, with the space in front where there "
                "is one"
            )
    return frozenset(token for (token,) in found.values())


def held_out_loss(run: Run, model: Transformer) -> dict[str, float]:
    """The metric of ``SftConfig.held_out``: mean negative log-likelihood, in nats, of the tokens of
    held-out demonstrations that training would count. Nothing where there are none.
    """
    if not run.config.sft.held_out:
        return {}
    shown = Demonstrations(run, held_out=True)
    loss = jax.jit(next_token_loss)
    total, tokens, position = 0.0, 0.0, 0
    while position < run.config.sft.held_out:
        batch, position = shown.batch(position)
        found = jax.device_get(loss(model, jax.device_put(batch, run.rows_sharding)))
        total += float(found[0])
        tokens += float(found[1])
    return {"sft/held_out_loss": total / max(tokens, 1.0)}


def warm_start(run: Run, stop: StopRequest) -> TrainState:
    """Trains from the run's initial model. It continues from its own checkpoint if there is one,
    and returns at once if that is of the last step.

    Writes metrics and checkpoints into the folder ``sft`` of the run's workdir. Raises
    FloatingPointError when the loss is not finite, Stopped when asked to stop.
    """
    config = run.config.sft
    workdir = run.workdir / FOLDER
    update = make_sft_update(config.optimizer, config.micro_batches)
    state = init_state(run.init_model(), config.optimizer)
    demonstrations = Demonstrations(run)
    with Checkpoints(
        workdir, run.config, keep=run.config.checkpoint.keep, may_change=may_differ(run.config)
    ) as checkpoints:
        restored = checkpoints.restore(state)
        start, position = 0, 0
        if restored is not None:
            start = restored.step
            position = restored.position["example"]
            state = restored.state
        with (
            MetricLog(
                run.journal / FOLDER,
                start,
                run.config.metrics.open_settings(),
                read_config.to_dict(run.config),
            ) as writer,
            Progress("warm start", config.steps, start) as progress,
            stop.deferred(),
        ):
            # the last step's is the one after it, where there is only one step
            held_out = held_out_loss(run, state.model) if start == 0 < config.steps - 1 else {}
            for step in range(start, config.steps):
                begin = time.perf_counter()
                batch, position = demonstrations.batch(position)
                counts = demonstrations.counts(batch)
                batch = jax.device_put(batch, run.rows_sharding)
                state, metrics = update(state, batch)
                metrics = jax.device_get(metrics)
                if not metrics["train/finite"]:
                    checkpoints.save(step, state, {"example": position})
                    raise FloatingPointError(f"warm start: the loss is not finite at step {step}")
                seconds = time.perf_counter() - begin
                speed = float(batch.mask.size) / seconds
                last = step + 1 == config.steps
                if last:
                    held_out |= held_out_loss(run, state.model)
                times = {"time/step_s": seconds, "time/tokens_per_s": speed}
                writer.write(step, {**counts, **metrics, **times, **held_out})
                held_out = {}
                progress.update(step + 1, loss=float(metrics["train/loss"]), tokens_per_s=speed)
                stopping = stop.agreed
                if (step + 1) % config.checkpoint_every == 0 or last or stopping:
                    checkpoints.save(step + 1, state, {"example": position})
                if stopping:
                    raise Stopped(
                        f"stopped after step {step + 1} of {config.steps} of the warm start"
                    )
    return state


def initial_model(run: Run) -> Transformer:
    """The model with which reinforcement learning began, read from what the run keeps. Unlike
    ``warm_start`` it trains and writes nothing, so it may be called while the run goes on.

    Raises CheckpointError when the warm start was not finished.
    """
    model = run.init_model()
    if run.config.sft is None:
        return model
    state = init_state(model, run.config.sft.optimizer)
    return checkpoint.load(run.workdir / FOLDER, state, step=run.config.sft.steps).state.model
