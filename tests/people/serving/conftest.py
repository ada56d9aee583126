"""A tiny random model that is served."""

from __future__ import annotations

import dataclasses

import pytest

from models.sharding import MeshConfig, make_mesh
from people.serving.access import Access
from people.serving.fleet import Fleet
from people.serving.probes import probes
from people.serving.service import Service
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.completions import FillInTheMiddle
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.rollout.engine import Engine
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.run.serving import ServingConfig
from tests.rl_code.harness.chats import chat_tokenizer
from tests.rl_code.harness.test_rollout import ENGINE
from tests.rl_code.harness.test_rollout import MODEL as TWO_LAYERS
from tests.rl_code.rollout.small import model_on

# An engine's programs have each layer once more.
MODEL = dataclasses.replace(TWO_LAYERS, num_layers=1)


@pytest.fixture(scope="package")
def served():
    """(endpoint, fleet, records of answers) of a server that samples every answer."""
    tokenizer = chat_tokenizer()
    stops = tuple(sorted(tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")))
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    # few blocks of the view, of which each is compiled
    shapes = dict(prompt_length=1600, length=1600, pages=512, prefill_tokens=128, view_block=400)
    config = dataclasses.replace(ENGINE, **shapes)
    engine = Engine(MODEL, config, SamplingConfig(), stops, mesh)

    def service(weights, version):
        scheduler = Scheduler(engine, tokenizer, workers=2, worker_deadline_s=600.0)
        return Service(scheduler, weights, version=version, protocol=PROTOCOLS["hermes"])

    records = []
    fleet = Fleet(
        service,
        protocol=PROTOCOLS["hermes"],
        tokenizer=tokenizer,
        secret=bytes(32),
        config=ServingConfig(fill_in=FillInTheMiddle()),
        on_answer=records.append,
    )
    fleet.models.load("tiny", 7, model_on(mesh, MODEL))
    find = Access(fleet).find
    shown = dict(routes=probes(fleet), on_error=fleet.metrics.refused)
    with fleet, Endpoint(find, **shown) as endpoint:
        yield endpoint, fleet, records
