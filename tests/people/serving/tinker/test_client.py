"""The published client ``tinker`` against the API, from an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.people.serving.tinker.api import server

PYTHON = os.environ.get("TINKER_PYTHON", "")

needs_package = pytest.mark.skipif(
    not PYTHON,
    reason="no Python with tinker: python -m venv tk; tk/bin/pip install tinker==0.38.0; "
    "TINKER_PYTHON=tk/bin/python",
)


@needs_package
@pytest.mark.long
def test_the_published_client_trains_two_adapters_and_samples_one(tmp_path):
    script = Path(__file__).with_name("client.py")
    with server(tmp_path / "tinker") as served:
        done = subprocess.run(
            [PYTHON, "-P", str(script), served.url, "tiny"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["models"] == ["tiny"]
    for losses in found["losses"]:
        assert losses[-1] < losses[0]
    assert found["logprobs"] == pytest.approx(found["trained"], abs=1e-3)
    assert found["prompt_logprobs"][0] is None
    assert np.isfinite(found["prompt_logprobs"][1:]).all()
    assert found["again"] == pytest.approx(found["before"], rel=1e-5)
    assert "loss_fn='gspo' is not served here" in found["refused"]
    assert found["listed"] == ["weights/one"]
