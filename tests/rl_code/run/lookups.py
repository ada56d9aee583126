"""Settings of runs of a few small steps, whose policy reads whatever it writes."""

from __future__ import annotations

from typing import Any

import ml_collections

from configs import quickstart


def small_settings(
    protocol: str,
    steps: int,
    group_size: int,
    *,
    prompt: int,
    limits: dict,
    pack: dict,
    **tasks: Any,
) -> ml_collections.ConfigDict:
    """A run of lookup tasks on one device, for two tasks a step. prompt: tokens of the longest one.
    limits, pack, tasks: settings of ``limits``, of ``train.pack`` and of the source of tasks.
    """
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.mesh.data = 1
    settings.protocol = protocol
    settings.tasks = dict(name="lookup", split="train", **tasks)
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turn_tokens=6, **limits)
    settings.rollout.engine.update(slots=4, prompt_length=prompt, prefill_tokens=64)
    settings.train.update(steps=steps, tasks_per_step=2, group_size=group_size, micro_batches=1)
    # nothing is solved, so what is learned is to be less sure
    settings.train.loss.update(entropy_coef=0.1)
    settings.train.pack.update(drop_uninformative=False, **pack)
    settings.checkpoint.update(every=2)
    constant_rate(settings)
    return settings


def constant_rate(settings: ml_collections.ConfigDict, rate: float = 0.01) -> None:
    """Learns at one rate. Runs of other numbers of steps share the program of an update."""
    with settings.unlocked():
        settings.train.optimizer.update(
            schedule="constant", warmup_steps=0, learning_rate=rate, total_steps=100
        )
