"""Tells what a run would take, without training: parameters, tokens, memory and programs.

The programs of a step and of sampling are compiled for abstract arrays, so no array of the model is
allocated. Memory is given for one device, part by part. The compiler says what the programs need
beside their arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from attention.implementations import Implementation
from models.lora import trained
from models.sharding import row_shards
from models.transformer import abstract_model
from rl_code.learner import picks, teacher
from rl_code.learner.batch import Batch
from rl_code.learner.batching import empty_batch
from rl_code.learner.config import LearnerConfig
from rl_code.learner.two_phase import make_two_phase_update
from rl_code.learner.two_phase_batching import pack_prompts
from rl_code.learner.update import TrainState, abstract_state, make_update
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_function import ValueState
from rl_code.learner.value_update import make_token_values, make_value_update
from rl_code.rollout.engine import Engine
from rl_code.run import teaching
from rl_code.run.attention_calls import attention_calls, expert_calls
from rl_code.run.config import check_rows
from rl_code.run.derive import sampled_tokens
from rl_code.run.run import Run
from rl_code.types import Task, Tests

# Nothing that is compiled here runs. On CPU most of the time goes into the machine code, and what a
# program holds in memory is settled before that.
_QUICKLY: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Memory of one device that one part of a run takes."""

    # "learner" or "sampler"; where both share devices, their parts add up.
    where: str
    name: str
    bytes: int
    # Conditions that it depends on, in words.
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    name: str
    seconds: float
    # Beside its arguments and results, on one device.
    temporary_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimate of the resources of a run."""

    parameters: int
    # Numbers of devices that learn, and that sample.
    learners: int
    samplers: int
    # Number of devices of the process that prefills prompts for actors; 0 for none.
    prefillers: int
    # True if these are the same devices.
    shared: bool
    # Trajectories of one step.
    trajectories: int
    # The most tokens that can be sampled in one step.
    sampled_tokens: int
    # Slots of the batch of one step.
    batch_slots: int
    memory: tuple[Part, ...]
    programs: tuple[Program, ...]
    # Implementation of every attention call, and of the experts.
    attention: tuple[Implementation, ...]
    # By name, how many tokens of every prompt the declaration of a tool takes.
    tools: dict[str, int]

    def device_bytes(self, where: str) -> int:
        """Memory of one device of the learner or the sampler."""
        wanted = ("learner", "sampler") if self.shared else (where,)
        parts = [part for part in self.memory if part.where in wanted]
        kept = sum(part.bytes for part in parts if not part.name.startswith("working"))
        # where devices are shared, only one of the programs runs at a time
        working = [part.bytes for part in parts if part.name.startswith("working")]
        return kept + max(working, default=0)


def plan(run: Run, tell: Callable[[str], None] = lambda words: None) -> Plan:
    """Compiles the programs of a run and adds up what they take.

    tell: gets the name of each program before it is compiled. Raises ConfigError as ``check_rows``.
    """
    config = run.config
    check_rows(config, row_shards(run.mesh))
    train = config.train
    model = abstract_model(run.model_config, run.mesh)
    with jax.set_mesh(run.mesh):
        state = abstract_state(model, train.optimizer, train.value)
        programs = list(_update(run, state, tell))
    # as it lies on the devices that sample
    sampling = abstract_model(run.sampling_model().config, run.rollout_mesh, whole=True)
    engine = run.engine(
        config.rollout.sampling,
        config.rollout.engine,
        config.protocol,
        config.rollout.dtype,
        run.rollout_mesh,
    )
    for name, trace in engine.tracers(sampling).items():
        tell(name)
        programs.append(_program(name, trace))
    shared = run.rollout_mesh == run.mesh
    rows, slots = train.pack.rows, train.pack.slots + train.pack.prompt_slots
    forks = config.rollout.forks
    parted = forks.most(config.limits.turns, train.group_size) if forks else 0
    trajectories = train.tasks_per_step * (train.group_size + parted)
    return Plan(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model)),
        learners=run.mesh.size,
        samplers=run.rollout_mesh.size,
        prefillers=prefill.mesh.devices if (prefill := config.rollout.prefill) else 0,
        shared=shared,
        trajectories=trajectories,
        sampled_tokens=trajectories
        * sampled_tokens(config.limits, config.summaries, config.memory.found().closing),
        batch_slots=rows * slots,
        memory=tuple(_memory(run, state, sampling, engine, programs)),
        programs=tuple(programs),
        attention=(
            *attention_calls(config, run.model_config),
            *expert_calls(config, run.model_config),
        ),
        tools=tool_tokens(lambda task: len(run.wording.prompt(task)), list(run.tools)),
    )


def tool_tokens(prompt_tokens: Callable[[Task], int], names: Sequence[str]) -> dict[str, int]:
    """Number of tokens that each tool adds to a prompt, by name. The cost of the list of tools as
    such, whatever stands in it, is "(any tool)".

    prompt_tokens: the tokens of a task's prompt.
    """

    def tokens(tools: Sequence[str]) -> int:
        messages = ({"role": "user", "content": "Mend it."},)
        task = Task("", messages, {}, "f.py", "f", Tests(), Tests(), {}, tools=tuple(tools))
        return prompt_tokens(task)

    every = tokens(names)
    found = {name: every - tokens([other for other in names if other != name]) for name in names}
    return found | {"(any tool)": every - tokens(()) - sum(found.values())}


def _update(run: Run, state: TrainState, tell: Callable[[str], None]) -> Iterator[Program]:
    """Compiles the programs of a step's update."""
    train = run.config.train
    loss = train.loss.for_staleness(train.pack.max_staleness)
    way = (loss, train.optimizer, train.micro_batches, train.pack.runs)
    choices = picks.shapes(run.model_config, train.pack.slots) if train.picks else {}
    batch = _abstract(empty_batch(train.pack, train.pack.rows, 0, choices), run.rows_sharding)
    targets = batch.mask
    prox = targets if train.epochs > 1 else None
    ref = targets if loss.kl_coef else None
    lesson = ()
    if train.teacher is not None:
        answer, reads, rows, *lesson = _lesson(run, state)
        tell("teacher")
        yield _program("teacher", functools.partial(answer.trace, reads, rows, lesson[0]))
    if train.pack.prompt_slots == 0:
        replay = train.picks == "replay"
        joint = None
        if train.value is not None:
            yield from _value_programs(train, state, batch, tell)
            if train.value.backbone == "shared":
                joint = train.value
                batch = dataclasses.replace(batch, values=targets, returns=targets)
        update = make_update(*way, replay, train.teacher, joint)
        tell("update")
        yield _program("update", functools.partial(update.trace, state, batch, prox, ref, *lesson))
        return
    prefill, update = make_two_phase_update(*way, train.teacher)
    prompts = _abstract(pack_prompts([], train.pack), run.rows_sharding)
    tell("update, prompts")
    yield _program("update, prompts", functools.partial(prefill.trace, state.model, prompts))
    prefilled = jax.eval_shape(prefill, state.model, prompts)
    tell("update, completions")
    trace = functools.partial(update.trace, state, prefilled, batch, prox, ref, *lesson)
    yield _program("update, completions", trace)


def _value_programs(
    train: LearnerConfig, state: TrainState, batch: Batch, tell: Callable[[str], None]
) -> Iterator[Program]:
    """Compiles the programs of the value function beside the policy's update."""
    shapes = (train.micro_batches, train.pack.runs, train.picks == "replay")
    tell("values")
    values = functools.partial(make_token_values(*shapes).trace, state.model, state.value.critic)
    yield _program("values", functools.partial(values, batch))
    if train.value.backbone == "shared" and not train.value.pretrain_steps:
        return  # the policy's update is the value function's too
    batch = dataclasses.replace(batch, values=batch.mask, returns=batch.mask)
    tell("update, values")
    update = make_value_update(train.value, *shapes)
    yield _program("update, values", functools.partial(update.trace, state, batch))


def _lesson(run: Run, state: TrainState) -> tuple:
    """The teacher's program, what it takes (the teacher, its rows, its words so far), and the
    ``guide`` of the update; abstract arrays.
    """
    train = run.config.train
    form = train.teacher.form
    shapes = teacher.shapes(train.teacher, train.pack)
    rows = _abstract(teacher.nothing(shapes), run.rows_sharding)
    own = teaching.abstract_teacher(run)
    way = (form, train.loss.temperature, train.micro_batches, shapes.runs)
    begin, answer = teacher.make_answers(*way)
    reads = state.model if own is None else own
    guide = own
    if own is None and (train.teacher.average is not None or train.epochs > 1):
        guide = trained(state.model)
    words = jax.eval_shape(begin, reads, rows)
    return answer, reads, rows, words, guide if form.whole else None


def _memory(
    run: Run, state: TrainState, sampling: Any, sampler: Engine, programs: list[Program]
) -> Iterator[Part]:
    train = run.config.train
    engine = sampler.config
    yield Part("learner", "weights", device_bytes(state.model), run.model_config.param_dtype)
    moments = device_bytes(state.opt_state)
    if train.optimizer.offload:
        note = f"{moments / 2**20:,.1f} MiB of moments in float32 in the host's memory"
        yield Part("learner", "optimizer", 0, note)
    else:
        yield Part("learner", "optimizer", moments, "moments in float32")
    if train.value is not None:
        yield from _value_memory(train.value, state.value)
    if train.loss.kl_coef:
        yield Part("learner", "reference weights", device_bytes(state.model), "for kl_coef")
    if train.teacher is not None:
        own = teaching.abstract_teacher(run)
        if own is not None:
            yield Part("learner", "teacher's weights", device_bytes(own), train.teacher.weights)
        elif train.teacher.average is not None:
            size = device_bytes(trained(state.model))
            yield Part("learner", "moving average", size, "of what is trained, which teaches")
        words = device_bytes(_lesson(run, state)[3]) // run.mesh.size
        yield Part("learner", "teacher's words", words, train.teacher.divergence.name)
    temporary = {program.name: program.temporary_bytes for program in programs}
    update = max(size for name, size in temporary.items() if name.startswith(("update", "teacher")))
    note = f"{train.micro_batches} micro-batches of {train.pack.rows // train.micro_batches} rows"
    yield Part("learner", "working memory: gradients, activations", update, note)
    dtypes = {run.config.rollout.dtype, run.model_config.dtype, run.model_config.param_dtype}
    quantised = run.config.rollout.weights
    same = run.rollout_mesh == run.mesh and len(dtypes) == 1 and run.mesh.shape["fsdp"] == 1
    same = same and quantised is None
    copy = 0 if same else device_bytes(sampling)
    form = run.config.rollout.dtype + (f", matrices in {quantised}" if quantised else "")
    note = "the learner's" if same else f"a copy in {form}"
    yield Part("sampler", "weights", copy, note)
    apart = sampler.own(sampling)
    shared = [getattr(apart, name, None) for name in ("embed", "final_norm", "unembed")]
    layers = device_bytes(apart) - device_bytes(shared)
    yield Part("sampler", "layers apart", layers, "copies, one by one, which it reads")
    note = f"{engine.pages} pages of {engine.page} tokens in {engine.cache_dtype}"
    yield Part("sampler", "pages", device_bytes(sampler.cache_shape()), note)
    working = max(temporary["prefill"], temporary["decode"])
    yield Part("sampler", "working memory: prefill or decode", working, f"{engine.slots} rows")


def _value_memory(config: ValueConfig, state: ValueState) -> Iterator[Part]:
    """Memory of a value function."""
    notes = {
        "shared": "a head on the policy's hidden states, in float32",
        "separate": "a copy of what is trained of the policy, and a head",
    }
    yield Part("learner", "value weights", device_bytes(state.critic), notes[config.backbone])
    moments = device_bytes(state.opt_state)
    if config.optimizer.offload:
        note = f"{moments / 2**20:,.1f} MiB of moments in float32 in the host's memory"
        yield Part("learner", "value optimizer", 0, note)
    else:
        yield Part("learner", "value optimizer", moments, "moments in float32")


def device_bytes(tree: Any) -> int:
    """Bytes on one device of abstract arrays that say their shardings."""

    def of(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def _abstract(arrays: Any, sharding: jax.sharding.Sharding) -> Any:
    """Shapes and dtypes of numpy arrays that are put on devices."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype, sharding=sharding), arrays
    )


def _program(name: str, trace: Callable[[], jax.stages.Traced]) -> Program:
    """Traces and compiles a program, and says how long that took."""
    begin = time.perf_counter()
    lowered = trace().lower()
    on_cpu = jax.default_backend() == "cpu"
    found = lowered.compile(_QUICKLY if on_cpu else None).memory_analysis()
    # some backends do not say
    temporary = 0 if found is None else found.temp_size_in_bytes
    return Program(name, time.perf_counter() - begin, temporary)
