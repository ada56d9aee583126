"""Runs of a process share their programs: what two runs compute alike is traced once."""

from __future__ import annotations

import functools

import pytest

from rl_code import run as run_lib
from rl_code import sft
from rl_code.learner import learner as learner_lib

# Each makes programs from arguments that compare by value, and keeps no state of its own.
MAKERS = {
    (run_lib, "Engine"): functools.cache(run_lib.Engine),
    (learner_lib, "make_update"): functools.cache(learner_lib.make_update),
    (learner_lib, "make_token_logprobs"): functools.cache(learner_lib.make_token_logprobs),
    (sft, "make_sft_update"): functools.cache(sft.make_sft_update),
}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    """Programs of equal configs are traced once in this process, however many runs there are."""
    for (module, name), make in MAKERS.items():
        monkeypatch.setattr(module, name, make)
