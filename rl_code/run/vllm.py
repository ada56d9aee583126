"""A run whose episodes vLLM samples: what it refuses, and its connection to the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from attention.methods.method import Method
from models import huggingface_config
from models.model_config import ModelConfig
from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError, refuse
from rl_code.host.files import write_atomically
from rl_code.rewards.combine import find_signals
from rl_code.rollout.vllm_client import VllmClient
from rl_code.rollout.vllm_config import OFF, VllmConfig
from rl_code.rollout.vllm_scheduler import VllmScheduler
from rl_code.run.keys import RunKeys


def check(config: RunKeys) -> None:
    """Raises ConfigError for what vLLM does not have, or not as this project's engine has it."""
    rollout, model = config.rollout, config.model
    engine, sampling = rollout.engine, rollout.sampling
    for at, suite in enumerate(config.suites):
        if suite.engine is not None and suite.engine.name != "own":
            raise ConfigError(
                f"config.suites[{at}].engine.name = {suite.engine.name!r}: suites are played by "
                "this project's engine, which gives the same episodes each time; set it to 'own'"
            )
    if engine.name != "vllm":
        if rollout.vllm != VllmConfig():
            raise ConfigError(
                "config.rollout.vllm is for rollout.engine.name='vllm', and that is "
                f"{engine.name!r}; set the name, or leave the section out"
            )
        return
    shape = model.shape()
    other = _other_methods(model.known_methods())
    refused = {
        "model.attention": (type(other[0]).__name__ if other else None, None),
        "model.lora": (model.lora, None),
        "documents": (config.documents, None),
        "rollout.weights": (rollout.weights, None),
        "rollout.picks": (rollout.picks, None),
        "rollout.prefill": (rollout.prefill, None),
        "rollout.prefill_mesh": (rollout.prefill_mesh, None),
        "rollout.apart": (rollout.apart, False),
        "rollout.forks": (rollout.forks, None),
        "rollout.engine.host_pages_mb": (engine.host_pages_mb, None),
        "rollout.engine.draft_tokens": (engine.draft_tokens, 0),
        "rollout.sampling.top_k": (sampling.top_k, 0),
        "rollout.sampling.top_p": (sampling.top_p, 1.0),
    }
    where = "with rollout.engine.name='vllm'"
    refuse(refused, where)
    if not sampling.temperature:
        raise ConfigError(
            f"config.rollout.sampling.temperature = {sampling.temperature} is not supported "
            f"{where}; set it above 0"
        )
    if shape is not None:
        check_model(shape)
    for active in find_signals(config.reward, "config.reward"):
        if getattr(active.signal, "asks_policy", False):
            raise ConfigError(
                f"config.reward.signals: {active.config.signal.name!r} asks the policy, whose "
                f"weights are in another process {where}; give it a url"
            )


def check_model(config: ModelConfig) -> None:
    """Raises ConfigError for a model whose weights cannot be pushed to vLLM, and compared there."""
    where = "with rollout.engine.name='vllm'"
    if config.moe is not None:
        raise ConfigError(
            f"config.model: a model with experts is not supported {where}: vLLM keeps their "
            "matrices together, and they could not be compared after a push"
        )
    if other := _other_methods(config.attention):
        raise ConfigError(
            f"config.model.attention = {type(other[0]).__name__} is not supported {where}: vLLM is "
            "pushed models with dense attention alone"
        )
    try:
        huggingface_config.config_to_dict(config, max_positions=1)
    except ValueError as error:
        raise ConfigError(f"config.model: vLLM cannot be pushed this model: {error}") from error


def _other_methods(methods: Sequence[Method]) -> list[Method]:
    """Those that do not attend to all keys with q, k and v alone, as vLLM is pushed them."""
    return [x for x in methods if not x.reads_all_pages or x.needs_documents]


# What a run notes of the server that sampled for it, and of what is off.
FILE = "vllm.json"


def connect(
    config: RunKeys,
    model: ModelConfig,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    workdir: Path,
    journal: Path,
) -> VllmScheduler:
    """The scheduler whose episodes the config's server samples. What the server is, and which
    guarantees are off, is noted in the folder ``journal``.

    Raises ConfigError where the server or the model does not fit, VllmError where it cannot be
    reached.
    """
    check_model(model)
    rollout = config.rollout
    engine, settings = rollout.engine, rollout.vllm
    client = VllmClient(settings.address, settings.deadline_s)
    client.await_up()
    server = client.check(rollout.dtype, engine.length, engine.slots)
    client.begin()
    logging.info("vLLM samples (%s); off: %s", server, "; ".join(OFF))
    noted = {"address": settings.address, "server": server, "off": OFF}
    write_atomically(journal / FILE, json.dumps(noted, indent=1).encode())
    folder = Path(settings.folder) if settings.folder else workdir / "vllm"
    return VllmScheduler(
        client,
        engine,
        rollout.sampling,
        stop_ids,
        tokenizer,
        folder.absolute(),
        workers=rollout.workers,
        worker_deadline_s=rollout.worker_deadline_s,
        gather_s=rollout.gather_s,
    )
