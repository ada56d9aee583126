"""The programs of a sampler that go through the layers one by one."""

from __future__ import annotations

import dataclasses

import pytest

from attention.methods.dense import Dense
from attention.methods.window import Window
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer, abstract_model
from rl_code.rollout.engine import Engine
from tests.models.small import small_config
from tests.rl_code.rollout import small


@pytest.mark.parametrize("decode", ["view", "pages"])
def test_layers_that_are_alike_are_traced_once(decode, monkeypatch):
    methods = (Dense(), Window(8))
    config = small_config(vocab_size=small.VOCAB, num_layers=6, attention=methods)
    traced = []
    block = Transformer.block

    def noted(self, layer, x, attend, real):
        traced.append(1)
        return block(self, layer, x, attend, real)

    monkeypatch.setattr(Transformer, "block", noted)
    engine = dataclasses.replace(small.ENGINE, decode=decode)
    mesh = make_mesh(MeshConfig(data=1))
    programs = Engine(config, engine, small.SAMPLING, (small.STOP,), mesh).traced(
        abstract_model(config)
    )
    assert len(traced) == len(methods) * len(programs)
