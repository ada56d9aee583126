"""The teacher of a run (``learner.teacher``): its weights, its prompts, and its part of the state.

Everything that trains on recorded groups makes its learner and its state here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from models.model_config import ModelConfig
from models.transformer import Transformer, abstract_model
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Restored
from rl_code.config.read_config import ConfigError
from rl_code.environment.tools.text import cut_middle
from rl_code.learner.config import LearnerConfig
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.feedback import with_feedback
from rl_code.learner.learner import Learner
from rl_code.learner.teacher import averages, with_average
from rl_code.learner.update import TrainState
from rl_code.run.run import Run
from rl_code.run.teacher import origin_of, shape_of
from rl_code.types import Task

# Characters of a feedback that are looked at, for each token that it may have.
_CHARACTERS = 16


def learner(run: Run, config: LearnerConfig, model: Transformer) -> Learner:
    """The learner of a run with its teacher.

    config: of the learner. model: the one that training begins with. Raises ConfigError for a
    teacher that cannot be read.
    """
    teacher = config.teacher
    if teacher is None:
        return Learner(config, run.rows_sharding, model)
    read = origin_of(teacher).load(_shape(run, teacher), run.mesh) if teacher.weights else None

    def prompt(task: Task, text: str) -> Sequence[int] | None:
        return prompt_with(run.wording.prompt_anew, task, text, teacher.feedback_tokens)

    return Learner(config, run.rows_sharding, model, read, prompt)


def prompt_with(
    encode: Callable[[Task], Sequence[int]], task: Task, text: str, most: int
) -> Sequence[int] | None:
    """Ids of the prompt of a task with feedback, at most ``most`` tokens longer than without. What
    is too long is cut in its middle. None where there is room for none of it.

    encode: makes the ids of a task's prompt. Raises ConfigError for a protocol that writes nothing
    of a task's messages.
    """
    plain = len(encode(task))
    width = min(len(text), _CHARACTERS * most)
    while width > 0:
        found = encode(with_feedback(task, cut_middle(text, width)))
        longer = len(found) - plain
        if longer <= 0:
            raise ConfigError(
                "config.train.teacher.feedback: the protocol writes nothing of a task's messages "
                f"into the prompt of task {task.id!r}; a teacher with this protocol reads none"
            )
        if longer <= most:
            return found
        width = min(width - 1, width * most // longer)
    return None


def restored(
    config: LearnerConfig,
    state: TrainState,
    workdir: Path,
    load: Callable[..., Restored | None],
    step: int | None = None,
) -> Restored | None:
    """A checkpoint in the form of ``state``, from load(abstract, partial=...).

    A fork may begin a moving average that its parent has not, from the weights of the fork's start,
    or leave out one that it has. step: of the checkpoint; None for the newest.
    """
    if not checkpoint.steps(workdir):
        return load(state, partial=False)
    names = checkpoint.record_of(workdir, step).arrays
    there = any(name.startswith("average.") for name in names)
    like = state if there else dataclasses.replace(state, average=None)
    found = load(like, partial=there and not averages(config))
    if found is None:
        return None
    return dataclasses.replace(found, state=with_average(config, found.state))


def abstract_teacher(run: Run) -> Transformer | None:
    """The teacher's parameters with shapes, dtypes and shardings; None where the run's own weights
    teach.
    """
    teacher = run.config.train.teacher
    if teacher is None or not teacher.weights:
        return None
    return abstract_model(_shape(run, teacher), run.mesh)


def _shape(run: Run, teacher: TeacherConfig) -> ModelConfig:
    return shape_of(teacher, run.config.model, run.model_config.dtype)
