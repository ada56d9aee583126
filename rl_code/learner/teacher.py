"""The teacher of a run: what it reads for the trajectories of a step, and what it says of them.

Before the updates of a step the teacher reads its contexts of the step's trajectories, without
gradient, in a program of its own. What it says of each sampled token (``distillation.Taught``) then
stands beside the batch like the log-probabilities of a reference policy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.lora import trained, with_trained
from models.sharding import constrain
from rl_code.learner.advantages import Credit
from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, empty_batch, select
from rl_code.learner.config import LearnerConfig
from rl_code.learner.distillation import Divergence, Taught, TeacherConfig, chosen_of
from rl_code.learner.examples import Example
from rl_code.learner.logprobs import Model, target_hidden, target_logits
from rl_code.learner.teacher_contexts import Prompt, TeacherRows, teacher_rows, with_prompts
from rl_code.learner.update import TrainState, init_state, split, take, used
from rl_code.types import Group, Task

# From a task and a feedback to the ids of the prompt that holds both; None where there is no room
# for feedback.
PromptWith = Callable[[Task, str], Prompt]


def averages(config: LearnerConfig) -> bool:
    """True if the state of training has a moving average."""
    return config.teacher is not None and config.teacher.average is not None


def first_state(config: LearnerConfig, model: Model) -> TrainState:
    """The state before the first update. The first update donates it, and ``model`` with it."""
    return with_average(config, init_state(model, config.optimizer, config.value))


def with_average(config: LearnerConfig, state: TrainState) -> TrainState:
    """The state with a moving average where the config asks for one, and with none where it does
    not. One that is missing, as at the start of a run or of a fork, begins as the weights are now.
    """
    if not averages(config):
        return dataclasses.replace(state, average=None)
    if state.average is not None:
        return state
    begun = jax.tree.map(lambda x: x.copy(), trained(state.model))
    return dataclasses.replace(state, average=begun)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _moved(average: Any, weights: Any, decay: float) -> Any:
    """decay x average + (1 - decay) x weights, in float32; equal numbers stay as they are."""

    def move(there: jax.Array, here: jax.Array) -> jax.Array:
        wide = there.astype(jnp.float32)
        step = (1.0 - decay) * (here.astype(jnp.float32) - wide)
        return (wide + step).astype(there.dtype)

    return jax.tree.map(move, average, weights)


def moved(config: TeacherConfig, state: TrainState) -> TrainState:
    """The state after a step with its moving average moved towards the new weights. ``average`` is
    donated.
    """
    average = _moved(state.average, trained(state.model), config.average)
    return dataclasses.replace(state, average=average)


def shapes(config: TeacherConfig, pack: PackConfig) -> PackConfig:
    """Shapes of the rows of teacher contexts: whole contexts, in an update of two phases too."""
    # prompts of other lengths may leave other slots empty behind them
    runs = pack.runs + 2 if pack.runs and pack.align > 1 else pack.runs
    slots = config.slots or pack.slots + pack.prompt_slots
    return dataclasses.replace(pack, slots=slots, runs=runs, prompt_slots=0)


class Teacher:
    """Says what a teacher thinks of a step's sampled tokens.

    Args:
      config: of the learner; it has a teacher.
      rows: the sharding of a batch's rows over the mesh.
      model: the teacher, where its weights are not those that are trained.
      prompt: makes the prompts with feedback; not needed without feedback.
    """

    def __init__(
        self,
        config: LearnerConfig,
        rows: jax.sharding.Sharding,
        model: Model | None = None,
        prompt: PromptWith | None = None,
    ):
        teacher = config.teacher
        if (model is None) == bool(teacher.weights):
            raise ValueError(f"{teacher.weights=} and the model that is given disagree")
        self._config = config
        self._rows = rows
        self._model = model
        self._prompt = prompt
        self._feedback = teacher.told
        if teacher.feedback is not None and prompt is None:
            raise ValueError("feedback needs a function that makes prompts with it")
        self._shapes = shapes(teacher, config.pack)
        temperature = config.loss.temperature
        way = (teacher.form, temperature, config.micro_batches, self._shapes.runs)
        self._begin, self._answer = make_answers(*way)

    def __call__(
        self,
        state: TrainState,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[Credit]],
        batch: Batch,
        version: int,
    ) -> tuple[Taught, Any]:
        """Return the words of the teacher on the targets of ``batch``, and the ``guide`` of the
        updates (``distillation.head_of``).

        state: before the updates of the step. batch: the policy's, numpy arrays, packed from groups
        and advantages.
        """
        teacher = self._config.teacher
        if teacher.weights:
            model, guide = self._model, self._model
        else:
            guide = state.average
            # the weights of the step, also in later epochs, whose updates donate them
            if guide is None and self._config.epochs > 1 and teacher.form.whole:
                guide = jax.tree.map(lambda x: x.copy(), trained(state.model))
            model = state.model if guide is None else with_trained(state.model, guide)
        taught = None
        for part in self.rows(groups, advantages, batch, version):
            part = jax.device_put(part, self._rows)
            taught = self._begin(model, part) if taught is None else taught
            taught = self._answer(model, part, taught)
        return taught, guide if teacher.form.whole else None

    def rows(
        self,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[Credit]],
        batch: Batch,
        version: int,
    ) -> list[TeacherRows]:
        """The rows that the teacher reads, numpy arrays; at least one part."""
        chosen, _, _ = select(groups, advantages, self._config.pack, version)
        if self._feedback is not None:
            chosen = [
                self._with_feedback(group, examples)
                for group, examples in zip(groups, chosen, strict=True)
            ]
        parts = list(teacher_rows(chosen, batch, self._shapes, version))
        return parts or [nothing(self._shapes)]

    def _with_feedback(self, group: Group, examples: Sequence[Example]) -> list[Example]:
        """The examples of a group as the teacher reads them."""
        assert self._feedback is not None and self._prompt is not None
        texts = [self._feedback(group, example.trajectory) for example in examples]
        # trajectories of a group may have the same feedback
        made = {text: self._prompt(group.task, text) for text in dict.fromkeys(texts) if text}
        return with_prompts(examples, [made.get(text) for text in texts])


def nothing(config: PackConfig) -> TeacherRows:
    """Rows without a context, numpy arrays with the shapes that ``teacher_rows`` gives."""
    batch = empty_batch(config, config.rows)
    return TeacherRows(batch, np.full(batch.mask.shape, batch.mask.size, np.int32))


def make_answers(
    form: Divergence, temperature: float, micro_batches: int, runs: int
) -> tuple[Callable[..., Taught], Callable[..., Taught]]:
    """Makes two programs: begin(model, rows) -> Taught in which nothing is said, and
    answer(model, rows, taught) -> ``taught`` with what the model says of the targets of the rows.

    Arguments as for ``update.make_token_logprobs``; the distributions are those of softmax(logits /
    temperature).
    """

    def said(model: Model, rows: TeacherRows) -> Taught:
        batch = rows.batch
        hidden, _, _ = target_hidden(model, batch, runs)
        found = jax.nn.log_softmax(target_logits(model, hidden, temperature))
        chosen = chosen_of(found, batch.targets)
        return Taught(batch.mask, chosen, **form.kept(hidden, found))

    def laid(taught: Taught) -> Taught:
        return jax.tree.map(lambda x: constrain(x, "batch", *(None,) * (x.ndim - 1)), taught)

    @jax.jit
    def begin(model: Model, rows: TeacherRows) -> Taught:
        like = jax.eval_shape(said, model, take(split(rows, micro_batches), 0))
        shape = rows.places.shape
        return laid(jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape[2:]), x.dtype), like))

    @jax.jit
    def answer(model: Model, rows: TeacherRows, taught: Taught) -> Taught:
        micro = split(rows, micro_batches)

        def body(i: jax.Array, taught: Taught) -> Taught:
            part = take(micro, i)
            places = part.places.reshape(-1)

            def put(whole: jax.Array, x: jax.Array) -> jax.Array:
                rest = x.shape[2:]
                flat = whole.reshape(-1, *rest)
                # places of padding lie behind the last target
                flat = flat.at[places].set(x.reshape(-1, *rest), mode="drop")
                return flat.reshape(whole.shape)

            return jax.tree.map(put, taught, said(model, part))

        return laid(jax.lax.fori_loop(0, used(micro.batch.mask), body, taught))

    return begin, answer
