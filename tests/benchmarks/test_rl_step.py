"""The bench of a training step prints one line with its numbers, also beside other steps."""

from __future__ import annotations

import json

import pytest
from absl import flags

from benchmarks import rl_step
from benchmarks.rl_step import compared
from models.transformer import parameter_count
from rl_code.rollout.stats import RolloutStats
from tests.benchmarks import small_bench
from tests.benchmarks.small_bench import TWO_LAYERS


@pytest.mark.long
def test_a_short_run_beside_steps_written_by_hand(tmp_path):
    flags = [
        "--model=tiny",
        "--workload=smoke",
        "--steps=1",
        "--warmup=1",
        "--tag=short",
        "--rival=hand",
        "--rival=hand_repeated",
        f"--json={tmp_path / 'a.json'}",
    ]
    done = small_bench.run("rl_step", *flags)
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
    table = TWO_LAYERS.vocab_size * TWO_LAYERS.embed_dim
    layers = parameter_count(TWO_LAYERS) - table
    least = 2 * (
        3 * (layers * (prompts + sampled) + table * sampled)
        + layers * (prompts + sampled)
        + table * sampled
    )
    assert 1.0 < 1e9 * report["gflop"] / least < 1.5

    assert set(report["beside"]) == {"hand", "hand_repeated"}
    for row in report["beside"].values():
        for part in ("step", "generation", "update"):
            for clock in ("", "_cpu"):
                median, least, most = row[f"ratio_{part}{clock}"]
                assert 0 < least <= median <= most and row[f"{part}{clock}_s"] > 0
    shared, repeated = (report["beside"][name] for name in ("hand", "hand_repeated"))
    # as many tokens as ours, up to empty slots; with prompts repeated 128 for every 72
    assert 0.8 < shared["gflop_update"] / report["gflop_update"] < 1.2
    assert 1.4 < repeated["gflop_update"] / shared["gflop_update"] < 1.9


def test_ratios_are_of_the_same_turn():
    ours = [{"step": 1.0}, {"step": 3.0}, {"step": 2.0}]
    theirs = [{"step": 2.0}, {"step": 4.0}, {"step": 8.0}]
    # 0.5, 0.75 and 0.25
    assert compared(ours, theirs) == {"step_s": 4.0, "ratio_step": [0.5, 0.25, 0.75]}


class Noted:
    """In place of a step: notes whose turn it is."""

    turns: list[str]
    stats = RolloutStats(slot_steps=1, row_steps=1)

    def __init__(self, prompt, completion, mesh, seed, share=None):
        self._name = {None: "ours", True: "hand", False: "hand_repeated"}[share]

    def sample(self, number):
        self.turns.append(f"{self._name} {number}")
        return number

    def learn(self, sampled):
        self.turns.append(f"{self._name} learns {sampled}")

    def gflop(self):
        return 2.0, 1.0

    def close(self):
        self.turns.append("closed")


def test_steps_take_turns(monkeypatch):
    monkeypatch.setattr(Noted, "turns", [], raising=False)
    for name in ("Ours", "ByHand"):
        monkeypatch.setattr(rl_step, name, Noted)
    monkeypatch.setattr(rl_step.bench_model, "matmul_rate", lambda *_: 1e9)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    report = rl_step.measure("smoke", 1, 1, 0, "", ["hand", "hand_repeated"])
    begun = [turn for turn in Noted.turns if "learns" not in turn]
    first, second = ["ours 0", "hand 0", "hand_repeated 0"], ["hand_repeated 1", "hand 1", "ours 1"]
    assert begun == [*first, *second, "closed"]
    assert Noted.turns[:2] == ["ours 0", "ours learns 0"]
    assert report["gflop"] == 3.0 and report["beside"]["hand"]["gflop_update"] == 2.0
    assert "beside" not in rl_step.measure("smoke", 1, 1, 0, "")
