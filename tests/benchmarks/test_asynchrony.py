"""The bench of asynchrony measures what its devices allow."""

from __future__ import annotations

import jax
import pytest
from absl import flags

from benchmarks import asynchrony


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, {"shared": (1, 1)}), (2, {"shared": (2, 2), "apart": (1, 1)})],
)
def test_learner_and_actor_have_devices_of_their_own_where_there_are_two(
    tmp_path, monkeypatch, count, expected
):
    devices = jax.devices()[:count]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(
        asynchrony, "arrange", lambda folder, console, mesh, sampling: (mesh.size, sampling.size)
    )
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    assert asynchrony.measure(tmp_path, None)["arrangements"] == expected
