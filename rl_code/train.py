"""Reinforcement learning of a coding agent: warm start, evaluate, then sample, grade, update, and evaluate again.

The loop is synchronous: the weights that sample a batch are the weights it is trained on. Everything that decides what
happens (which tasks, which random numbers) is a function of the config and the step, so a run that was killed and
started again ends with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from models.transformer import Transformer
from rl_code import config as config_lib
from rl_code import sft
from rl_code.checkpoint import Checkpoints
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.suite import SuiteResult
from rl_code.learner.advantages import group_advantages
from rl_code.learner.batching import pack
from rl_code.learner.update import TrainState, init_state, make_token_logprobs, make_update
from rl_code.metrics import CompilationCounter, MetricWriter, Progress, TrajectoryLog, write_atomically
from rl_code.rollout.scheduler import RolloutStats
from rl_code.run import MAY_CHANGE, Run, RunConfig
from rl_code.stop import Stopped, StopRequest
from rl_code.tasks.screening import TaskPool
from rl_code.types import Group, Trajectory

CONFIG_FILE = "config.json"


def train(config: RunConfig, workdir: str | Path) -> list[SuiteResult]:
    """Runs a config to its end, from wherever the workdir left off; returns all evaluations.

    Raises CheckpointError or ConfigError for a workdir that cannot be continued, SandboxUnavailable where code cannot
    be run safely, FloatingPointError when the loss is not finite (the checkpoint is from before that step), Stopped
    after Ctrl-C or SIGTERM.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with Run(config, workdir) as run, jax.set_mesh(run.mesh), StopRequest() as stop:
        if run.config.sft.steps:
            model = sft.warm_start(run, stop).model
        else:
            model = run.init_model()
        write_atomically(workdir / CONFIG_FILE, config_lib.to_json(config).encode())
        evaluate(run, model, "before", 0)
        state = _reinforce(run, model, stop)
        evaluate(run, state.model, "after", config.train.steps)
        return suite_lib.load_all(workdir)


# --- The loop --------------------------------------------------------------------------------------------------------


def _reinforce(run: Run, model: Transformer, stop: StopRequest) -> TrainState:
    """The RL steps that are still to be done."""
    config = run.config.train
    update = make_update(config.loss, config.optimizer, config.micro_batches)
    token_logprobs = make_token_logprobs(config.loss.temperature, config.micro_batches)
    scheduler = run.scheduler(run.config.rollout.sampling)
    sampling_key = jax.random.key(run.config.seed + 1)
    reference = jax.tree.map(lambda x: x.copy(), model) if config.loss.kl_coef else None
    checkpoint = run.config.checkpoint

    with Checkpoints(run.workdir, run.config, keep=checkpoint.keep, may_change=MAY_CHANGE) as checkpoints:
        state = init_state(model, config.optimizer)
        restored = checkpoints.restore(state)
        start, position = 0, None
        if restored is not None:
            start, position, state = restored.step, restored.position["tasks"], restored.state
        log = TrajectoryLog(run.workdir, run.tokenizer.decode, start)
        pool = TaskPool(len(run.tasks), run.config.seed, config.screening, position)

        with (
            MetricWriter(run.workdir, start) as writer,
            Progress("training", config.steps, start) as progress,
            CompilationCounter() as compilations,
            stop.deferred(),
        ):
            for step in range(start, config.steps):
                begin = time.perf_counter()

                # Choose the tasks: with screening, those that the policy solves sometimes.
                sampler = run.sampler(state.model)
                screened = _screen(run, pool, sampler, step, progress)
                if screened and step == 0:
                    checkpoints.save(0, state, {"tasks": pool.position()})
                chosen = pool.draw(config.tasks_per_step)
                screen_done = time.perf_counter()

                # Sample: G episodes of each task, in the sandbox, with the current weights.
                groups, stats = scheduler.rollout(
                    sampler,
                    [run.tasks[i] for i in chosen],
                    run.episode,
                    group_size=config.group_size,
                    version=step,
                    key=sampling_key,
                    first_group=step * config.tasks_per_step,
                )
                sampled = time.perf_counter()

                # Credit: advantages within each group, then fixed shapes with each prompt once.
                advantages = group_advantages(groups, config.advantage, config.advantage_eps)
                batch, pack_metrics = pack(groups, advantages, config.pack, version=step)
                batch = jax.device_put(batch, run.rows_sharding)

                # Update. With one epoch the policy of the first pass is the proximal policy.
                prox = token_logprobs(state.model, batch) if config.epochs > 1 else None
                ref = token_logprobs(reference, batch) if reference is not None else None
                for _ in range(config.epochs):
                    state, update_metrics = update(state, batch, prox, ref)

                # Write down, while the update runs.
                log.append(step, groups)
                pool.record({i: _solved(group) for i, group in zip(chosen, groups, strict=True)})
                metrics = rollout_metrics(groups, stats) | pack_metrics | jax.device_get(update_metrics)
                done = time.perf_counter()
                metrics |= {
                    "time/step_s": done - begin,
                    "time/screening_s": screen_done - begin,
                    "time/rollout_s": sampled - screen_done,
                    "time/update_s": done - sampled,
                    "time/compilations": compilations.count,
                    "tasks/screened": screened,
                    "tasks/pool": len(pool.active),
                    "time/tokens_per_s": stats.sampled_tokens / (done - begin),
                }
                writer.write(step, metrics)
                progress.update(
                    step + 1,
                    reward=metrics["reward/total"],
                    pass_rate=metrics["reward/solved"],
                    tokens_per_s=metrics["time/tokens_per_s"],
                )
                if not metrics["train/finite"]:
                    checkpoints.save(step, state, {"tasks": pool.position()})
                    raise FloatingPointError(
                        f"the loss or its gradient is not finite at step {step}; the weights of before it are saved"
                    )
                last = step + 1 == config.steps
                if (step + 1) % checkpoint.every == 0 or last or stop.requested:
                    checkpoints.save(step + 1, state, {"tasks": pool.position()})
                if stop.requested and not last:
                    raise Stopped(f"stopped after step {step + 1} of {config.steps}")
        return state


def _screen(run: Run, pool: TaskPool, sampler: Transformer, step: int, progress: Progress) -> int:
    """Samples tasks until the pool has enough of them that the policy solves sometimes; returns how many it sampled."""
    screening, count = run.config.train.screening, 0
    while tasks := pool.to_screen():
        progress.note(
            f"screening {len(tasks)} tasks x {screening.samples}: {len(pool.active)} of {screening.least} found"
        )
        groups, _ = run.scheduler(run.config.rollout.sampling).rollout(
            sampler,
            [run.tasks[i] for i in tasks],
            run.episode,
            group_size=screening.samples,
            version=step,
            key=jax.random.fold_in(jax.random.key(run.config.seed + 2), step),
            first_group=count,
        )
        pool.screened({i: _solved(group) for i, group in zip(tasks, groups, strict=True)})
        count += len(tasks)
    return count


def _solved(group: Group) -> tuple[int, int]:
    """(episodes solved, episodes graded) of a group."""
    graded = [trajectory for trajectory in group.trajectories if trajectory.status != "fault"]
    return sum(suite_lib.solved(trajectory) for trajectory in graded), len(graded)


# --- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(run: Run, model: Transformer, label: str, step: int) -> None:
    """Plays every suite that has no result under this label yet, and keeps the results in the workdir."""
    for suite in run.config.suites:
        if (run.workdir / suite_lib.FOLDER / f"{suite.name}.{label}.json").exists():
            continue
        solved = []
        with Progress(f"{suite.name} {label}", len(run.suite_tasks(suite)) * suite.samples) as progress:

            def count(trajectory: Trajectory, solved=solved, progress=progress) -> None:
                solved.append(suite_lib.solved(trajectory))
                progress.update(len(solved), pass_rate=sum(solved) / len(solved))

            result = run.evaluate(suite, model, label=label, step=step, on_finished=count)
        result.save(run.workdir)


# --- What is measured ------------------------------------------------------------------------------------------------


def rollout_metrics(groups: Sequence[Group], stats: RolloutStats) -> dict[str, float]:
    """Means over the episodes of one step, and how the time of sampling was spent."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    solved = [_solved(group) for group in groups]

    def mean(values) -> float:
        return float(np.mean([float(value) for value in values]))

    return {
        "reward/total": mean(t.reward.total for t in trajectories),
        **{
            f"reward/{name}": mean(t.reward.components.get(name, 0.0) for t in trajectories)
            for name in sorted({name for t in trajectories for name in t.reward.components})
        },
        "reward/solved": mean(suite_lib.solved(t) for t in trajectories),
        "reward/first_edit": mean(t.first_edit_passed for t in trajectories),
        "reward/mixed_groups": mean(0 < good < graded for good, graded in solved),
        "episode/sampled_tokens": mean(t.sampled.sum() for t in trajectories),
        "episode/tokens": mean(len(t.tokens) for t in trajectories),
        "episode/turns": mean(sum(turn.role == "assistant" for turn in t.turns) for t in trajectories),
        "episode/malformed_calls": mean(t.malformed_calls for t in trajectories),
        "episode/submitted": mean(t.status == "submitted" for t in trajectories),
        "episode/faults": float(sum(t.status == "fault" for t in trajectories)),
        "rollout/sampled_tokens": float(stats.sampled_tokens),
        "rollout/prefilled_tokens": float(stats.prefilled_tokens),
        "rollout/prefix_hit_rate": stats.prefix_hit_rate,
        "rollout/occupancy": stats.occupancy,
        "rollout/preempted": float(stats.preempted),
        "rollout/kv_mib": stats.kv_bytes / 2**20,
        "time/decode_s": stats.decode_s,
        "time/prefill_s": stats.prefill_s,
        "time/tool_wait_s": stats.wait_s,
        "time/tools_s": sum(t.seconds.get("tools", 0.0) for t in trajectories),
        "time/grade_s": sum(t.seconds.get("grade", 0.0) for t in trajectories),
    }
