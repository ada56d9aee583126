"""Fixtures of tests with a store of groups."""

from __future__ import annotations

import os

import pytest

from rl_code.store import store as store_lib


@pytest.fixture(scope="module")
def quick_store():
    """Nobody cuts the power, and the learner looks often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(store_lib, "_POLL_S", 0.005)
        yield
