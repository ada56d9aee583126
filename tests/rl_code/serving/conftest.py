"""A tiny random model that is served."""

from __future__ import annotations

import dataclasses

import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.rollout.engine import Engine
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.serving.endpoint import Endpoint
from rl_code.serving.service import Service
from tests.rl_code.harness.chats import chat_tokenizer
from tests.rl_code.harness.test_rollout import ENGINE, MODEL
from tests.rl_code.rollout.small import model_on


@pytest.fixture(scope="package")
def served():
    """(endpoint, service, records of answers) of a server that samples every answer."""
    tokenizer = chat_tokenizer()
    stops = tuple(sorted(tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")))
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    shapes = dict(prompt_length=1600, length=1600, pages=512, prefill_tokens=128)
    config = dataclasses.replace(ENGINE, **shapes)
    engine = Engine(MODEL, config, SamplingConfig(), stops, mesh)
    scheduler = Scheduler(engine, tokenizer, workers=2, tool_timeout_s=600.0)
    records = []
    service = Service(
        scheduler,
        model_on(mesh, MODEL),
        model="tiny",
        version=7,
        protocol=PROTOCOLS["hermes"],
        tokenizer=tokenizer,
        on_answer=records.append,
    )
    with service, Endpoint(service.find) as endpoint:
        yield endpoint, service, records
    scheduler.close()
