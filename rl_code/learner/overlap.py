"""What a two-phase update gains: one step with a wait in place of the rollouts, in one phase and in two.

In one phase nothing can begin before the rollouts are there; in two the prompts are computed while they go on. The wait
sleeps, as for tools, tests or samplers on other devices; rollouts on the learner's own cores would compete with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from rl_code.learner.batching import Prompts
from rl_code.learner.losses import LossConfig
from rl_code.learner.two_phase import make_two_phase_update, residual_bytes
from rl_code.learner.update import OptimizerConfig, TrainState, make_update
from rl_code.types import Batch


def measure_overlap(
    state: TrainState,
    batch: Batch,
    prompts: Prompts,
    completions: Batch,
    *,
    loss: LossConfig,
    optimizer: OptimizerConfig,
    micro_batches: int,
    runs: int = 0,
    wait_s: float,
    repeats: int,
) -> dict[str, float]:
    """Medians over ``repeats`` steps of each kind, taken in turn, in seconds, after one of each that is not timed.

    batch: of one phase; prompts and completions: the same groups for two. The state passed in is donated.

    Returns one_phase_s and two_phase_s (wait and update), dispatch_s (until the call of the first phase returned),
    prefill_s (until the first phase was done, when nothing waits), and residual_mib (kept between the phases).
    """
    update = make_update(loss, optimizer, micro_batches, runs)
    prefill, finish = make_two_phase_update(loss, optimizer, micro_batches, runs)
    seconds: dict[str, list[float]] = {"one_phase_s": [], "two_phase_s": [], "dispatch_s": [], "prefill_s": []}
    prefilled = None
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        time.sleep(wait_s)
        state, one_phase = _timed(lambda state=state: update(state, batch)[0], start)

        start = time.perf_counter()
        prefilled = prefill(state.model, prompts)
        dispatch = time.perf_counter() - start
        time.sleep(wait_s)
        state, two_phase = _timed(lambda state=state, kept=prefilled: finish(state, kept, completions)[0], start)

        prefilled, alone = _timed(lambda state=state: prefill(state.model, prompts), time.perf_counter())
        if repeat:  # the first compiles
            for name, value in zip(seconds, (one_phase, two_phase, dispatch, alone), strict=True):
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return medians | {"residual_mib": residual_bytes(prefilled) / 2**20}


def _timed(step: Callable[[], Any], start: float) -> tuple[Any, float]:
    """(what the step returns once it is done, seconds since ``start``)."""
    result = jax.block_until_ready(step())
    return result, time.perf_counter() - start
