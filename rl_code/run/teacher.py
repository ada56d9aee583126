"""The teacher that a config names: its weights, and whether they go with the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from models.model_config import ModelConfig
from models.padding import cut_config, pad_config
from models.tokenizer import Tokenizer
from rl_code.checkpoint import checkpoint
from rl_code.config.read_config import ConfigError
from rl_code.learner.config import LearnerConfig
from rl_code.learner.distillation import TeacherConfig
from rl_code.run import origin as origin_lib
from rl_code.run.config import RunConfig
from rl_code.run.derive import bounds_runs
from rl_code.run.origin import Origin
from rl_code.run.sections import ModelSpec

_KEY = "config.train.teacher"


def reads_test_errors(config: LearnerConfig) -> bool:
    """True if episodes keep what each test said (``Trajectory.test_errors``)."""
    told = config.teacher.told if config.teacher is not None else None
    return told is not None and told.reads_test_errors


def check(config: RunConfig, origin: Origin, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a teacher that does not go with a run; reads no weights.

    origin: of the run's weights. model: the shape of the run's model.
    """
    teacher = config.train.teacher
    if teacher is None:
        return
    vocabulary = cut_config(model).vocab_size
    try:
        teacher.form.check(vocabulary)
    except ValueError as error:
        raise ConfigError(f"{_KEY}.divergence: {error}") from error
    theirs = origin_of(teacher) if teacher.weights else origin
    most = theirs.max_positions()
    longest = config.limits.tokens + (teacher.feedback_tokens if teacher.feedback else 0)
    if config.documents is None and not config.model.longer_context:
        if most is not None and longest > most:
            raise ConfigError(
                f"{_KEY}: its contexts have up to {longest} tokens (limits.tokens and "
                f"feedback_tokens), and the model at {theirs.weights!r} was trained for {most}; "
                "lower one of them, or set model.longer_context=True"
            )
    if not teacher.weights:
        return
    if theirs.workdir is not None and not isinstance(theirs.step, int):
        raise ConfigError(
            f"{_KEY}.weights = {teacher.weights!r} is another checkpoint whenever that run saves "
            f"one, and a replay would have another teacher; name a step with @, one of "
            f"{checkpoint.steps(theirs.workdir)}"
        )
    shape = shape_of(teacher, config.model, model.dtype)
    there = cut_config(shape).vocab_size
    if there != vocabulary or _tokens(theirs) != tokenizer.vocabulary:
        raise ConfigError(
            f"{_KEY}.weights = {teacher.weights!r}: its tokenizer is not that of the run, so its "
            "tokens are others; take a teacher with the same tokenizer, or give the run the "
            "teacher's (config.tokenizer.path)"
        )
    if bounds_runs(shape.attention) and not config.train.pack.runs:
        raise ConfigError(
            f"{_KEY}.weights = {teacher.weights!r}: its layers choose blocks or keep a "
            "state, so a row must have a bound on its runs; set config.train.pack.runs"
        )


def _tokens(origin: Origin) -> dict[str, int]:
    """Text -> id of each token of a teacher's tokenizer; its chat template does not matter."""
    return origin.tokenizer(chat_template="family").vocabulary


def origin_of(teacher: TeacherConfig) -> Origin:
    """The weights of a teacher that has its own. Raises ConfigError, which names the key."""
    return _named(teacher, lambda: origin_lib.find(teacher.weights))


def shape_of(teacher: TeacherConfig, spec: ModelSpec, dtype: str) -> ModelConfig:
    """The shape of a teacher with weights of its own, computed as the run's model is.

    spec: of the run's model. dtype: in which that is computed.
    """
    shape = _named(teacher, origin_of(teacher).shape)
    shape = dataclasses.replace(shape, dtype=dtype)
    return pad_config(shape, spec.pad_for or 1, spec.pad_experts_for or 1)


def _named(teacher: TeacherConfig, read: Callable[[], Any]) -> Any:
    """Result of reading, with errors that name the teacher's key."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{_KEY}.weights = {teacher.weights!r}: {error}") from error
