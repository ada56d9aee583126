"""Forks a run: another run that shares its record up to a step, and goes on from there.

What happened before the step is shared by hard links. What the parent planned and sampled from the
step on is taken over only if the change cannot have affected it (``fork_changes``):

- Nothing changed: everything is taken over, and the fork must come to the same weights.
- Only what the learner does with groups changed: groups that versions of before the fork sampled.
  They are what the fork would sample, and in in_flight mode they could not be sampled again.
- Anything else changed: nothing, since even the plan may be another one.

The fork is made in a folder beside its workdir, ``.<name>.fork``, which then gets its name in one
step. A fork that is refused or stopped removes that folder. One that was killed leaves it, and the
same command makes it again.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from models.transformer import abstract_model
from rl_code import sft
from rl_code.checkpoint import arrays, checkpoint
from rl_code.checkpoint import record as checkpoint_record
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.evaluation import suite
from rl_code.host.files import write_atomically
from rl_code.learner.teacher import first_state
from rl_code.learner.update import TrainState, abstract_state
from rl_code.learner.value_function import abstract_value, carried
from rl_code.metrics.progress import Progress
from rl_code.metrics.values import METRICS_FILE, read_metrics
from rl_code.metrics.writers import JsonLines, MetricLog, TensorBoard
from rl_code.recording import fork_changes, fork_position, kept_config
from rl_code.recording.recorded_versions import RecordedVersions, nearest
from rl_code.recording.replay_training import replay
from rl_code.rewards import reward_model
from rl_code.run import lineage, origin, provenance, teaching
from rl_code.run.config import RunConfig
from rl_code.run.lineage import Fork
from rl_code.run.retraining import retrained
from rl_code.run.run import Run
from rl_code.run.workdir import CONFIG_FILE, MAY_CHANGE, STORE
from rl_code.store.errors import StoreError
from rl_code.store.sharing import Shared, link_tree, share
from rl_code.store.store import GroupStore
from rl_code.tasks import cache
from rl_code.weights.stored_publisher import StoredPublisher


@dataclasses.dataclass(frozen=True)
class Forked:
    """A fork that was made."""

    fork: Fork
    shared: Shared
    # whether it was there already
    before: bool = False


def fork(
    parent: Path,
    workdir: Path,
    step: int | None,
    config: RunConfig,
    *,
    other_bits: bool = False,
    resample: bool = False,
) -> Forked:
    """Makes ``workdir`` a run that shares the record of ``parent`` before ``step``.

    Args:
      step: the first step of its own; None for the newest checkpoint's.
      config: of the steps from there on.
      other_bits: updates from the step on need not repeat the parent's bit for bit. The fork says
        so, and takes over nothing that later weights sampled.
      resample: take over nothing beyond the step, as after a change of code.

    Raises:
      ConfigError: the step is not there, a key cannot change, or the workdir holds another run.
      StoreError: the record does not reach back far enough, or cannot be shared.
    """
    own = kept_config.read(parent)
    step = _step(parent, step)
    before = lineage.config_at(parent, own, max(0, step - 1))
    fork_changes.check(before, config, step)
    entry = _entry(parent, step, before, config, other_bits=other_bits, resample=resample)
    if workdir.exists() and any(workdir.iterdir()):
        return _made_before(workdir, entry, config)
    there = lineage.config_at(parent, own, step)
    reach = fork_changes.reach_of(parent, there, config, step, other_bits)
    reach = "nothing" if resample else reach
    draft = workdir.with_name(f".{workdir.name}.fork")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        shared = share(parent / STORE, draft / STORE, step, reach, before.asynchrony.max_staleness)
        shared.bytes += _share_rest(parent, draft, step, config)
        shared.bytes += _share_reward_model(parent, draft, step, before, config)
        write_atomically(draft / CONFIG_FILE, read_config.to_json(config).encode())
        lineage.write(draft, [*(f for f in lineage.read(parent) if f.step < step), entry])
        with Run(config, draft, "learner") as run:
            _check_state(run, before)
            position = fork_position.at_fork(parent, own, run, step, reach)
            _share_state(parent, own, draft, step, run, position)
        _provide_version(parent, own, draft, step, config)
        os.sync()  # what the name stands for is on the disk before the name is
        if workdir.exists():
            workdir.rmdir()  # it is empty
        draft.rename(workdir)
    except BaseException:  # Ctrl-C too: its links would keep what the parent deletes
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Forked(entry, shared)


# --- What is refused ------------------------------------------------------------------------------


def _step(parent: Path, step: int | None) -> int:
    """The step to fork at. Raises ConfigError."""
    saved = checkpoint.steps(parent)
    if step is None:
        return max(saved, default=0)
    consumed = GroupStore(parent / STORE).consumed()
    first, done = (consumed[0], consumed[-1] + 1) if consumed else (0, 0)
    if not first <= step <= done:
        raise ConfigError(
            f"--step={step}: {parent} has done {done} steps, and can be forked at {first} to {done}"
        )
    return step


def _check_state(run: Run, before: RunConfig) -> None:
    """Raises ConfigError where the optimizer has another state than the recorded one."""
    there, here = (_describe(run, config.train.optimizer) for config in (before, run.config))
    differing = sorted(name for name in there | here if there.get(name) != here.get(name))
    if differing:
        keys = read_config.diff(before.train.optimizer, run.config.train.optimizer)
        name = differing[0]
        raise ConfigError(
            f"config.train.optimizer cannot change {' and '.join(keys)} in a fork: the recorded "
            f"state has {there.get(name, 'nothing')} as {name}, the new optimizer "
            f"{here.get(name, 'nothing')}"
        )


def _describe(run: Run, optimizer: Any) -> dict[str, str]:
    """Names, dtypes and shapes of the state of training."""
    model = abstract_model(run.model_config, run.mesh)
    with jax.set_mesh(run.mesh):
        return arrays.describe(abstract_state(model, optimizer))


def _entry(parent: Path, step: int, before: RunConfig, config: RunConfig, **how: bool) -> Fork:
    changes = [
        [key, read_config.lookup(before, key), read_config.lookup(config, key)]
        for key in read_config.diff(before, config)
    ]
    return Fork(
        parent=str(parent.absolute()),
        step=step,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config=read_config.to_dict(before),
        changes=changes,
        differing=provenance.differing(provenance.last(parent), provenance.describe()),
        **how,
    )


def _made_before(workdir: Path, entry: Fork, config: RunConfig) -> Forked:
    """The fork that is there already. Raises ConfigError if the workdir holds something else."""
    there = lineage.read(workdir)
    same = bool(there) and (there[-1].parent, there[-1].step) == (entry.parent, entry.step)
    if not same or read_config.diff(kept_config.read(workdir), config, without=MAY_CHANGE):
        raise ConfigError(
            f"--workdir={workdir} holds another run already; name a folder that does not exist"
        )
    for flag in ("other_bits", "resample"):
        was, asked = getattr(there[-1], flag), getattr(entry, flag)
        if was != asked:
            raise ConfigError(
                f"--workdir={workdir} holds a fork that was made {'with' if was else 'without'} "
                f"--{flag}; name a folder that does not exist"
            )
    return Forked(there[-1], Shared(), before=True)


# --- What is shared -------------------------------------------------------------------------------


def _share_rest(parent: Path, draft: Path, step: int, config: RunConfig) -> int:
    """Shares all but the store and the state; the bytes of shared files.

    Files that a run writes anew are linked. Those that it adds lines to are copied, up to the step.
    """
    total = 0
    for folder in (origin.FOLDER, provenance.CODE):
        if (parent / folder).exists():
            total += link_tree(parent / folder, draft / folder)
    if (parent / sft.FOLDER).exists():
        total += _share_warm_start(parent / sft.FOLDER, draft / sft.FOLDER, config)
    for name in (provenance.STARTS_FILE, *cache.FILES):
        if (parent / name).exists():
            shutil.copyfile(parent / name, draft / name)
    _copy_metrics(parent, draft, step, config)
    for result in suite.load_all(parent):
        if result.step <= step:
            result.save(draft)
    return total


def _share_reward_model(
    parent: Path, draft: Path, step: int, before: RunConfig, config: RunConfig
) -> int:
    """Shares the versions of a reward model that pay episodes up to the step, where the fork trains
    it in the same way; else they are made again from the record. The bytes of shared files.
    """
    found = retrained(config.reward)
    if found is None or read_config.diff(before.reward, config.reward):
        return 0
    last = step // found[1].retrain.every
    source, target = parent / reward_model.FOLDER, draft / reward_model.FOLDER
    versions = [version for version in checkpoint.steps(source) if version <= last]
    return sum(_share_checkpoint(source, target, version) for version in versions)


def _copy_metrics(parent: Path, draft: Path, step: int, config: RunConfig) -> None:
    """The metrics of the steps before, for the writers that keep them in the workdir."""
    kept = (JsonLines, TensorBoard)
    writers = [writer for writer in config.metrics.open_settings() if type(writer) in kept]
    with MetricLog(draft, 0, writers) as log:
        for row in read_metrics(parent):
            if row["step"] < step:
                log.write(row["step"], {name: row[name] for name in row if name != "step"})


def _share_warm_start(source: Path, target: Path, config: RunConfig) -> int:
    """The warm start, as one of the fork's config."""
    total = link_tree(source, target, frozenset({METRICS_FILE, "checkpoints"}))
    if (source / METRICS_FILE).exists():
        shutil.copyfile(source / METRICS_FILE, target / METRICS_FILE)
    for at in checkpoint.steps(source):
        total += _share_checkpoint(source, target, at, config=read_config.to_dict(config))
    return total


def _share_checkpoint(source: Path, target: Path, step: int, **changes: Any) -> int:
    """A checkpoint with some fields of its record changed; the bytes of its files."""
    there = checkpoint_record.folder_of(source / "checkpoints", step)
    here = checkpoint_record.folder_of(target / "checkpoints", step)
    record = checkpoint_record.read(there)
    checkpoint_record.check_files(there, record)
    total = link_tree(there, here, frozenset({checkpoint_record.RECORD}))
    checkpoint_record.write(here, dataclasses.replace(record, **changes))
    return total


# --- The state ------------------------------------------------------------------------------------


def _share_state(
    parent: Path,
    own: RunConfig,
    draft: Path,
    step: int,
    run: Run,
    position: dict[str, Any],
) -> None:
    """The parent's checkpoints up to the step, from which earlier versions can be made again, and
    that of the step itself, which is made where the parent has none, and where the fork has
    another value function.
    """
    config = run.config
    # the config by which the parent's state before the step was made, or carried over
    there = lineage.config_at(parent, own, step)
    saved = [at for at in checkpoint.steps(parent) if at <= step]
    for at in saved:
        if at < step:
            _share_checkpoint(parent, draft, at)
    (draft / "checkpoints").mkdir(exist_ok=True)
    if pins := [at for at in checkpoint_record.pinned(parent / "checkpoints") if at <= step]:
        checkpoint_record.pin(draft / "checkpoints", pins)
    keeps_value = _value_shapes(run, there) == _value_shapes(run, config)
    if step in saved and keeps_value:
        same = own.checkpoint.best == config.checkpoint.best
        changes = {} if same else {"score": None}
        whole = read_config.to_dict(config)
        _share_checkpoint(parent, draft, step, config=whole, position=position, **changes)
        return
    state = _state_at(parent, own, step)
    if not keeps_value:
        over: Any = state.step.sharding
        with jax.set_mesh(over.mesh):
            value = carried(state.value, state.model, config.train.value)
        state = dataclasses.replace(state, value=value)
    keep = len(saved) + 1
    # All keys may change: older checkpoints of a fork are of its parent's config.
    sections = tuple(json.loads(read_config.to_json(config)))
    with Checkpoints(draft, config, keep=keep, may_change=sections) as checkpoints:
        checkpoints.save(step, state, position)


def _value_shapes(run: Run, config: RunConfig) -> dict[str, str]:
    """Names, dtypes and shapes of a config's value function."""
    value = config.train.value
    if value is None:
        return {}
    with jax.set_mesh(run.mesh):
        return arrays.describe(abstract_value(abstract_model(run.model_config, run.mesh), value))


def _state_at(parent: Path, own: RunConfig, step: int) -> TrainState:
    """The state before a step without a checkpoint, by training again from the one before it."""
    start = nearest(GroupStore(parent / STORE), parent, step)
    with Run(own, parent, "learner") as run, jax.set_mesh(run.mesh):
        train = lineage.config_at(parent, own, step).train
        if start == step:
            fresh = first_state(train, sft.initial_model(run))
            load = functools.partial(checkpoint.load, parent, step=step)
            return teaching.restored(train, fresh, parent, load, step).state if step else fresh
        with Progress(f"training again from step {start}", step - start) as progress:
            for done in replay(run, start, step):
                if not done.same:
                    raise StoreError(
                        f"step {done.step} of {parent} gives weights {done.now} here and gave "
                        f"{done.then} then: this program does not repeat the run's updates bit for "
                        f"bit. Fork at a checkpoint, of step {checkpoint.steps(parent)}, with "
                        "--other_bits"
                    )
                state = done.state
                progress.update(done.step + 1 - start)
        return state


def _provide_version(
    parent: Path, own: RunConfig, draft: Path, step: int, config: RunConfig
) -> None:
    """Stores the versions before the fork's first that groups still to be sampled need."""
    store = GroupStore(draft / STORE)
    if config.asynchrony.mode not in ("one_step", "behind"):
        return
    ahead = config.asynchrony.max_staleness
    steps = range(step, min(step + ahead, config.train.steps))
    needed = sorted({max(0, at - ahead) for at in steps if not _is_sampled(store, at)} - {step})
    if not needed:
        return
    with Run(own, parent, "learner") as run, jax.set_mesh(run.mesh):
        models = RecordedVersions(run, run).get(needed)
        rollout = config.rollout
        publisher = StoredPublisher(
            draft, rollout.dtype, config.asynchrony.weights, quantised=rollout.weights
        )
        for version in needed:
            publisher.publish(version, models[version])
        publisher.close()


def _is_sampled(store: GroupStore, step: int) -> bool:
    """True if all that a step trains on is there."""
    listing = store.reader.listing(step)
    if listing is None or not listing.parts:
        return False
    trained = any(item.kind == "train" for item in store.items(step, listing))
    return trained and not store.missing(step)
