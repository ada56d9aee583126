"""Every test of kernels in the interpreters also tests that they race with nothing."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_races(capsys):
    """No kernel of the test reads what is still being written, or writes what is still being
    read.
    """
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
