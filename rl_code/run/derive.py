"""Values that follow from a run's config, so that nobody needs to write them down.

A key that a config leaves at None gets the value that follows from other keys. A key that a config
sets keeps its value. ``settle`` goes through the sections in the order in which they depend on each
other, and ``WHY`` says in words where each value comes from, for people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from attention.methods.method import Method
from rl_code.config.read_config import ConfigError
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.summaries import (
    Closing,
    SummariesConfig,
    longest_context,
    most_sampled,
)
from rl_code.evaluation.suites import SuiteConfig
from rl_code.learner.batching import PackConfig
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.rollout.asynchrony import MODES, AsynchronyConfig
from rl_code.rollout.engine_config import EngineConfig
from rl_code.run.keys import RunKeys
from rl_code.run.sections import RolloutConfig, SftConfig, TrainConfig
from rl_code.types import Limits

# Prompts that an engine keeps pages for, beside those of the episodes it has open.
PROMPTS = 8

# Seconds that sandboxes may need beyond the limits of what runs in them, to start and to be given
# up.
GRACE_S = 120.0

# The most tokens of a document, where limits leave room for more.
DOCUMENT = 1024

# Dotted key -> what its value follows from where the config leaves it at None.
WHY = {
    "asynchrony.max_staleness": "the least of asynchrony.mode",
    "asynchrony.weights.keep": "asynchrony.max_staleness + 2",
    "rollout.dtype": "model.dtype",
    "rollout.worker_deadline_s": "the longest that limits let tools and grading take, and a grace",
    "rollout.engine.page": "the block of model.attention, where layers choose blocks",
    "rollout.engine.view_block": "a multiple of rollout.engine.page",
    "rollout.engine.length": "limits.tokens, or summaries.context",
    "rollout.engine.prompt_length": "limits.tokens, less what may be sampled",
    "rollout.engine.episodes": "slots, and 2/3 more where tools make episodes wait",
    "rollout.engine.cache_dtype": "rollout.dtype",
    "rollout.engine.pages": "all open episodes at their longest, and prompts",
    "train.optimizer.total_steps": "train.steps x train.epochs",
    "train.value.optimizer.total_steps": "train.steps x train.epochs, and pretraining",
    "train.loss.constant_length": "the most tokens a trajectory can sample",
    "train.pack.rows": "a row for each group, or for each trajectory",
    "train.pack.slots": "limits, train.group_size where groups share a row, and mesh.context",
    "train.pack.targets": "limits, train.group_size where groups share a row, and mesh.context",
    "train.pack.runs": "prompts and trajectories of a row, where layers have blocks or states",
    "train.teacher.slots": "a row of train.pack, and the feedback of its trajectories",
    "train.micro_batches": "train.pack.rows / (mesh.data x mesh.fsdp x mesh.expert)",
    "sft.optimizer.total_steps": "sft.steps",
    "documents.longest": "whole pages within limits.tokens, at most 1024 tokens",
    "suites.sampling": "rollout.sampling",
    "suites.engine": "as rollout.engine, from the suite's limits and dtype",
}


def settle(config: RunKeys) -> dict[str, Any]:
    """The sections of a config with every value that follows from others: by name, complete."""
    asynchrony = _asynchrony(config.asynchrony)
    block = block_of(config.model.known_methods())
    documents = _documents(config.documents, config.limits, block or config.rollout.engine.page)
    rollout = _rollout(config, documents, block)
    temperature = rollout.sampling.temperature or 1.0  # greedy: the policy itself is trained
    train = _train(config, rollout.engine, asynchrony.max_staleness, temperature, documents)
    return {
        "asynchrony": asynchrony,
        "rollout": rollout,
        "train": train,
        "sft": _sft(config.sft),
        "suites": tuple(
            _suite(suite, config, rollout, documents, block) for suite in config.suites
        ),
        "documents": documents,
    }


def sampled_tokens(
    limits: Limits, summaries: SummariesConfig | None = None, closing: Closing | None = None
) -> int:
    """The most tokens that the policy can sample in one trajectory."""
    return min(most_sampled(limits, summaries, closing), limits.tokens)


def longest_wait_s(config: RunKeys, limits: Limits) -> float:
    """Wall-clock seconds within which a message is answered and an episode graded."""
    milestones_s = limits.grade_s if config.milestones is not None else 0.0
    return limits.longest_wait_s + milestones_s


def block_of(methods: Sequence[Method]) -> int | None:
    """Tokens of the blocks that a model's layers choose; None if no layer chooses blocks.

    Raises ConfigError for layers with blocks of different sizes, which no page fits.
    """
    sizes = sorted({method.block_size() for method in methods if method.block_size()})
    if len(sizes) > 1:
        raise ConfigError(
            f"config.model.attention: layers choose blocks of {' and '.join(map(str, sizes))} "
            "tokens; give them one size, since a page of the cache is one block"
        )
    return sizes[0] if sizes else None


def bounds_runs(methods: Sequence[Method]) -> bool:
    """True for layers that need a bound on the runs of a row: those that choose blocks or keep a
    state.
    """
    return block_of(methods) is not None or any(method.keeps_state for method in methods)


def engine(
    given: EngineConfig,
    limits: Limits,
    dtype: str,
    group_size: int,
    documents: DocumentsConfig | None = None,
    block: int | None = None,
    note_picks: bool = False,
    summaries: SummariesConfig | None = None,
) -> EngineConfig:
    """An engine's shapes, for episodes within these limits.

    dtype: of the sampling copy of the model. group_size: episodes that share a prompt. documents:
    those of the run, None for none. block: of ``block_of``; a page is then a block, whatever the
    config says for other methods. note_picks: whether tokens are sampled for training, in a run
    with ``rollout.picks``. summaries: those of the run, None for none.
    """
    # those of one context
    limits = dataclasses.replace(limits, tokens=longest_context(summaries, limits))
    waits = limits.turns > 1  # for tools, between turns
    page = block or given.page
    config = _filled(
        dataclasses.replace(
            given,
            page=page,
            view_block=-(-given.view_block // page) * page,
            longest_document=documents.longest if documents else None,
            note_picks=note_picks,
        ),
        length=limits.tokens,
        prompt_length=longest_prompt(limits),
        # while episodes wait for tools, others take their rows
        episodes=given.slots * 5 // 3 if waits else given.slots,
        cache_dtype=dtype,
    )
    # Room for the worst case. Each open episode has pages of its own for what follows the prompt,
    # and one more: the page in which the prompt ends. The other pages of the prompt are shared by
    # the group. There are as many prompts as open episodes can have, and some more, so that those
    # of earlier groups can still be found.
    own = -(-(config.length - config.prompt_length) // config.page) + 1
    prompts = max(PROMPTS, -(-config.episodes // group_size) + 1)
    shared = -(-config.prompt_length // config.page)
    return _filled(config, pages=config.episodes * own + prompts * shared)


def longest_prompt(limits: Limits) -> int:
    """The longest prompt that is played: one that leaves room for all that the policy may sample.

    With several turns, in which tools answer too, a prompt of half the trajectory is always played.
    """
    if limits.turns == 1:
        return max(1, limits.tokens - limits.turn_tokens)
    return max(1, limits.tokens - limits.turns * limits.turn_tokens, limits.tokens // 2)


def pack(
    given: PackConfig,
    limits: Limits,
    prompt: int,
    tasks: int,
    group_size: int,
    bounded: bool = False,
    parts: int = 1,
    summaries: SummariesConfig | None = None,
    closing: Closing | None = None,
    late: int = 0,
) -> PackConfig:
    """A batch's shapes, with room for the worst case; the update skips what is empty.

    prompt: tokens of the longest prompt. tasks: groups of a step. bounded: whether layers need a
    bound on the runs of a row. parts: devices over which its slots and targets are cut. summaries,
    closing: what the run asks episodes for, beside messages of work. late: rows for what is
    credited in a later step.
    """
    sampled = sampled_tokens(limits, summaries, closing)
    # Contexts that begin with a summary: each is one more run behind the prompt.
    more = summaries.most if summaries else 0
    # The most tokens that can follow a prompt. With several turns that is all the shortest prompt
    # leaves, and how short a prompt can be is not known.
    completion = min(limits.turn_tokens, limits.tokens) if limits.turns == 1 else limits.tokens
    if given.prompt_slots:  # prompts stand in rows of their own: completions alone, from there on
        rows = given.rows or tasks
        together = -(-tasks // rows) * group_size  # trajectories of a row
        slots = together * (completion + 1 + more)
        shapes = {"rows": rows, "slots": slots, "targets": together * sampled}
        prompts = -(-tasks // rows)
    elif (group_size - 1) * prompt >= group_size * completion:
        # A group in one row computes its prompt once. That saves at least as many slots as what
        # follows the prompt takes.
        slots = prompt + group_size * completion
        shapes = {"rows": tasks, "slots": slots, "targets": group_size * sampled}
        prompts, together = 1, group_size
    else:
        # A row for each trajectory at its longest. Shorter ones share rows, as far as they fit.
        shapes = {"rows": tasks * group_size, "slots": limits.tokens, "targets": sampled}
        prompts, together = 1, 1
    if bounded and not given.runs:
        # An aligned run takes up to three blocks more than its tokens, so there are no more runs
        # than this needs: a prompt, and what each trajectory adds to it.
        given = dataclasses.replace(given, runs=prompts + together * (1 + more))
    shapes["slots"] += together * more * (given.align - 1)  # that ``align`` may leave empty
    shapes["rows"] += late
    for name in ("slots", "targets"):
        shapes[name] += -shapes[name] % parts
    return _filled(given, **shapes)


def _asynchrony(given: AsynchronyConfig) -> AsynchronyConfig:
    config = _filled(given, max_staleness=MODES[given.mode][0])
    weights = _filled(config.weights, keep=config.max_staleness + 2)
    return dataclasses.replace(config, weights=weights)


def _rollout(
    config: RunKeys, documents: DocumentsConfig | None, block: int | None
) -> RolloutConfig:
    played = [config.limits, *(suite.limits for suite in config.suites if suite.limits)]
    rollout = _filled(
        config.rollout,
        dtype=config.model.dtype,
        worker_deadline_s=max(longest_wait_s(config, limits) for limits in played) + GRACE_S,
    )
    shapes = engine(
        rollout.engine,
        config.limits,
        rollout.dtype,
        config.train.group_size,
        documents,
        block,
        rollout.picks is not None,
        config.summaries,
    )
    return dataclasses.replace(rollout, engine=shapes)


def _train(
    config: RunKeys,
    shapes: EngineConfig,
    max_staleness: int,
    temperature: float,
    documents: DocumentsConfig | None,
) -> TrainConfig:
    train = config.train
    limits = config.limits
    size = train.group_size
    if train.continuations and config.rollout.forks is not None:
        size += config.rollout.forks.most(limits.turns, size)
    groups = train.tasks_per_step, size
    parts = config.mesh.context or 1
    asked = config.summaries, config.memory.found().closing
    shards = config.mesh.row_shards
    # Each group tells the worth of one store at most.
    late = train.tasks_per_step if config.memory.left_out else 0
    late += -late % (shards or 1)
    bounded = bounds_runs(config.model.known_methods())
    packing = pack(train.pack, limits, shapes.prompt_length, *groups, bounded, parts, *asked, late)
    packing = dataclasses.replace(
        packing,
        max_staleness=max_staleness,
        documents=documents,
        parts=parts,
        demonstrated=train.demonstrations is not None,
        untrained=train.parts.paid("none"),
        late_staleness=config.memory.oldest if config.memory.left_out else 0,
    )
    loss = _filled(train.loss, constant_length=sampled_tokens(limits, *asked))
    value = train.value
    alone = 0 if value is None else min(value.pretrain_steps, train.steps)
    updates = (train.steps - alone) * train.epochs
    if value is not None:
        updates_of_value = updates + alone * value.pretrain_epochs
        value = dataclasses.replace(value, optimizer=_optimizer(value.optimizer, updates_of_value))
    return dataclasses.replace(
        _filled(
            train,
            # one row a device; where the number of devices is not known yet, all rows at once
            micro_batches=packing.rows // shards if shards and packing.rows % shards == 0 else 1,
        ),
        loss=dataclasses.replace(loss, temperature=temperature),
        pack=packing,
        teacher=_teacher(train.teacher, packing, limits),
        picks=config.rollout.picks,
        optimizer=_optimizer(train.optimizer, updates),
        value=value,
    )


def _teacher(
    given: TeacherConfig | None, packing: PackConfig, limits: Limits
) -> TeacherConfig | None:
    """The shapes of a teacher's rows: those of the policy's, and the feedback of each trajectory
    that such a row is sized for.
    """
    if given is None:
        return None
    slots = packing.slots + packing.prompt_slots
    if given.feedback is not None:
        together = max(1, packing.targets // sampled_tokens(limits))
        # prompts with feedback part in another place; what follows begins at a multiple of align
        more = given.feedback_tokens + 2 * (packing.align - 1)
        slots += together * more
    return _filled(given, slots=slots + -slots % packing.parts)


def _documents(given: DocumentsConfig | None, limits: Limits, page: int) -> DocumentsConfig | None:
    """page: tokens of a page of the cache."""
    if given is None:
        return None
    longest = max(1, min(DOCUMENT, limits.tokens) // page) * page
    return _filled(dataclasses.replace(given, page=page), longest=longest)


def _sft(given: SftConfig | None) -> SftConfig | None:
    if given is None:
        return None
    return dataclasses.replace(given, optimizer=_optimizer(given.optimizer, given.steps))


def _optimizer(given: OptimizerConfig, updates: int) -> OptimizerConfig:
    # the schedule of a run of no steps is never asked for, but must be one
    return _filled(given, total_steps=max(updates, given.warmup_steps + 1))


def _suite(
    given: SuiteConfig,
    config: RunKeys,
    rollout: RolloutConfig,
    documents: DocumentsConfig | None,
    block: int | None,
) -> SuiteConfig:
    suite = _filled(given, sampling=rollout.sampling)
    if suite.engine is None and suite.limits is None and suite.dtype is None:
        if rollout.engine.name == "own":
            return suite  # plays with the engine of training, and its compiled programs
        return dataclasses.replace(suite, engine=dataclasses.replace(rollout.engine, name="own"))
    shapes = engine(
        # what the config says of the engine, not what followed for training
        suite.engine or dataclasses.replace(config.rollout.engine, name="own"),
        suite.limits or config.limits,
        suite.dtype or rollout.dtype,
        config.train.group_size,
        documents,
        block,
        summaries=config.summaries,
    )
    return dataclasses.replace(suite, engine=shapes)


def _filled[T](section: T, **values: Any) -> T:
    """A section with these values where it has None."""
    missing = {name: value for name, value in values.items() if getattr(section, name) is None}
    return dataclasses.replace(section, **missing) if missing else section
