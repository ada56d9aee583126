"""The bench of a training step prints one line with its numbers."""

from __future__ import annotations

import json

from models.families import PRESETS
from models.transformer import parameter_count
from tests import programs

TINY = PRESETS["tiny"]


def test_a_short_run(tmp_path):
    flags = [
        "--model=tiny",
        "--workload=smoke",
        "--steps=1",
        "--warmup=1",
        "--tag=short",
        f"--json={tmp_path / 'a.json'}",
    ]
    done = programs.run("launch.bench", "rl_step", *flags)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"peer": "ours"')]
    report = json.loads(line)
    assert report == json.loads((tmp_path / "a.json").read_text())
    assert report["workload"] == "smoke" and report["tag"] == "short"
    assert report["s_per_step"] >= max(report["generation_s"], report["update_s"]) > 0
    assert report["peak_rss_mib"] > 0 and report["gen_tokens_per_s"] > 0
    # every prompt once: 2 FLOPs a parameter and token forward, three times that with gradients;
    # attention on top
    prompts = 8 * 64
    sampled = 8 * 8 * 64
    table = TINY.vocab_size * TINY.embed_dim
    layers = parameter_count(TINY) - table
    least = 2 * (
        3 * (layers * (prompts + sampled) + table * sampled)
        + layers * (prompts + sampled)
        + table * sampled
    )
    assert 1.0 < 1e9 * report["gflop"] / least < 1.5
