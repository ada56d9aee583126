"""The teacher of a run (``learner.teacher``): its weights, its prompts, and its part of the state.

Everything that trains on recorded groups makes its learner and its state here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.padding import cut_config, pad_config
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
from rl_code.run import origin as origin_lib
from rl_code.run.derive import bounds_runs
from rl_code.types import Task

if TYPE_CHECKING:  # a run checks its teacher when it is made
    from models.model_config import ModelConfig
    from rl_code.run.origin import Origin
    from rl_code.run.run import Run

_KEY = "config.train.teacher"
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
    read = _origin(teacher).load(_shape(run, teacher), run.mesh) if teacher.weights else None

    def prompt(task: Task, text: str) -> Sequence[int] | None:
        return prompt_with(run.prompt_anew, task, text, teacher.feedback_tokens)

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
                f"{_KEY}.feedback: the protocol writes nothing of a task's messages into the "
                f"prompt of task {task.id!r}; a teacher with this protocol reads no feedback"
            )
        if longer <= most:
            return found
        width = min(width - 1, width * most // longer)
    return None


def reads_test_errors(config: LearnerConfig) -> bool:
    """True if episodes keep what each test said (``Trajectory.test_errors``)."""
    told = config.teacher.told if config.teacher is not None else None
    return told is not None and told.reads_test_errors


def check(run: Run) -> None:
    """Raises ConfigError for a teacher that does not go with the run; reads no weights. Processes
    that only sample have no teacher.
    """
    teacher = run.config.train.teacher
    if teacher is None or run.role not in ("all", "learner"):
        return
    vocabulary = cut_config(run.model_config).vocab_size
    try:
        teacher.form.check(vocabulary)
    except ValueError as error:
        raise ConfigError(f"{_KEY}.divergence: {error}") from error
    origin = _origin(teacher) if teacher.weights else run.origin
    most = origin.max_positions()
    longest = run.config.limits.tokens + (teacher.feedback_tokens if teacher.feedback else 0)
    if run.config.documents is None and not run.config.model.longer_context:
        if most is not None and longest > most:
            raise ConfigError(
                f"{_KEY}: its contexts have up to {longest} tokens (limits.tokens and "
                f"feedback_tokens), and the model at {origin.weights!r} was trained for {most}; "
                "lower one of them, or set model.longer_context=True"
            )
    if not teacher.weights:
        return
    if origin.workdir is not None and not isinstance(origin.step, int):
        raise ConfigError(
            f"{_KEY}.weights = {teacher.weights!r} is another checkpoint whenever that run saves "
            f"one, and a replay would have another teacher; name a step with @, one of "
            f"{checkpoint.steps(origin.workdir)}"
        )
    shape = _shape(run, teacher)
    there = cut_config(shape).vocab_size
    if there != vocabulary or _tokens(origin) != run.tokenizer.vocabulary:
        raise ConfigError(
            f"{_KEY}.weights = {teacher.weights!r}: its tokenizer is not that of the run, so its "
            "tokens are others; take a teacher with the same tokenizer, or give the run the "
            "teacher's (config.tokenizer.path)"
        )
    if bounds_runs(shape.attention) and not run.config.train.pack.runs:
        raise ConfigError(
            f"{_KEY}.weights = {teacher.weights!r}: its layers choose blocks or keep a "
            "state, so a row must have a bound on its runs; set config.train.pack.runs"
        )


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


def _tokens(origin: Origin) -> dict[str, int]:
    """Text -> id of each token of a teacher's tokenizer; its chat template does not matter."""
    return origin.tokenizer(chat_template="family").vocabulary


def _origin(teacher: TeacherConfig) -> Origin:
    """Raises ConfigError, which names the key."""
    return _named(teacher, lambda: origin_lib.find(teacher.weights))


def _shape(run: Run, teacher: TeacherConfig) -> ModelConfig:
    """The shape of a teacher with weights of its own, computed as the run's model is."""
    shape = _named(teacher, _origin(teacher).shape)
    shape = dataclasses.replace(shape, dtype=run.model_config.dtype)
    spec = run.config.model
    return pad_config(shape, spec.pad_for or 1, spec.pad_experts_for or 1)


def _named(teacher: TeacherConfig, read: Callable[[], Any]) -> Any:
    """Result of reading, with errors that name the teacher's key."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{_KEY}.weights = {teacher.weights!r}: {error}") from error
