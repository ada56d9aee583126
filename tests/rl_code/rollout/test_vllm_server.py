"""vLLM itself samples what the trainer computes: its CPU build, in an environment of its own.

    RL_CODE_VLLM_PYTHON=vllm-env/bin/python pytest tests/rl_code/rollout/test_vllm_server.py

docs/vllm.md says how the environment is made. Without the variable these tests are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from configs import asynchrony
from models import huggingface
from models.families import PRESETS
from models.model_config import ModelConfig
from models.transformer import Transformer
from rl_code.config.read_config import build
from rl_code.metrics.values import read_metrics
from rl_code.recording.replay_training import replay
from rl_code.rollout.vllm_client import Request, Sampled, VllmClient
from rl_code.rollout.vllm_scheduler import VllmScheduler
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.train import train
from tests.rl_code.rollout.small import (
    ENGINE,
    SAMPLING,
    STOP,
    Episode,
    Letters,
    Protocol,
    _trainer,
    task_of,
    trainer_logprobs,
)

PYTHON = os.environ.get("RL_CODE_VLLM_PYTHON")
ROOT = Path(__file__).resolve().parents[3]
SERVE = ROOT / "rl_code" / "rollout" / "in_vllm" / "serve.py"
PATIENCE_S = 500.0
STEPS = 3
# Tokens of the longest context.
LENGTH = 224
PROMPT = [1, 2, 3]
ATTEMPTS = 20
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="RL_CODE_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(900),
]


def make_config(address: str) -> RunConfig:
    """A run of few tasks without a warm start, with the smallest heads that vLLM's kernels take."""
    settings = asynchrony.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turns=3, tokens=LENGTH, turn_tokens=32)
    settings.rollout.update(apart=False)
    settings.rollout.engine.update(name="vllm", slots=8)
    settings.rollout.vllm = dict(address=address, deadline_s=PATIENCE_S)
    settings.train.update(steps=STEPS, tasks_per_step=2, group_size=4, micro_batches=1)
    settings.train.pack.update(rows=8, drop_uninformative=False)
    settings.train.loss.update(entropy_coef=0.01)  # a gradient where no task is solved, too
    settings.asynchrony.update(mode="sync", max_staleness=0)
    return build(RunConfig, settings)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, ModelConfig]]:
    """The address of a server for the run's model, and that model's shape."""
    patch = pytest.MonkeyPatch()
    patch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=2))
    folder = tmp_path_factory.mktemp("vllm")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with Run(make_config(address), folder / "run", "learner") as run:
        model = run.model_config
        huggingface.save(folder / "model", drawn(model, 0), max_positions=LENGTH)
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [PYTHON, str(SERVE), f"--model={folder / 'model'}", f"--port={port}",
             "--dtype=float32", f"--max-model-len={LENGTH}", "--max-num-seqs=8", "--block-size=32",
             "--enforce-eager"],
            env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        VllmClient(address, PATIENCE_S).await_up()
        yield address, model
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60.0)
        patch.undo()


def drawn(config: ModelConfig, seed: int) -> Transformer:
    """Random weights, larger than at the start of training, so that tokens depend on the context.

    The norms are not changed: vLLM and the trainer would both sum larger numbers.
    """
    model = Transformer(dataclasses.replace(config, dtype="float32"), nnx.Rngs(seed))
    return jax.tree.map(lambda x: 3.0 * x if x.ndim > 1 else x, model)


@contextlib.contextmanager
def playing(address: str, folder: Path) -> Iterator[VllmScheduler]:
    client = VllmClient(address, PATIENCE_S)
    client.begin()
    settings = dict(workers=2, worker_deadline_s=PATIENCE_S)
    scheduler = VllmScheduler(client, ENGINE, SAMPLING, (STOP,), Letters(), folder, **settings)
    try:
        yield scheduler
    finally:
        scheduler.close()


def differences(trajectories, model) -> np.ndarray:
    """Log-probabilities of sampled tokens, less those of the trainer."""
    found = []
    for row, t in zip(trainer_logprobs(trajectories, model), trajectories, strict=True):
        at = np.flatnonzero(t.sampled)
        found.append(t.logprobs[at] - row[at - 1, t.tokens[at]])
    return np.concatenate(found)


@pytest.mark.parametrize("rule", [False, True])
def test_log_probabilities_are_the_trainers_after_every_push(served, tmp_path, rule):
    """A head that vLLM left as it was would show here, and before in the checksums."""
    address, config = served
    with playing(address, tmp_path) as scheduler:
        for version in (1, 2):
            model = drawn(config, version)
            scheduler.load(model, version)
            for seed in range(3):
                make = lambda *one: Episode(*one, protocol=Protocol(rule))  # noqa: E731
                way = dict(group=seed, group_size=4, key=(version, 2), tag=seed)
                scheduler.submit(task_of(seed), make, **way)
            groups = {}
            while scheduler.groups:
                groups |= scheduler.step()
            trajectories = [t for group in groups.values() for t in group.trajectories]
            assert {*np.concatenate([t.versions[t.sampled] for t in trajectories])} == {version}
            assert np.abs(differences(trajectories, model)).max() < 1e-4


def test_a_message_in_progress_goes_on_with_the_pushed_weights(served, tmp_path):
    """Its keys are computed anew, so each token has the log-probability that its version gives."""
    address, config = served
    client = VllmClient(address, PATIENCE_S)
    client.begin()
    models = {label: drawn(config, seed) for seed, label in enumerate(("first", "second"), 1)}
    folders = {label: tmp_path / label for label in models}
    for label, model in models.items():
        huggingface.save(folders[label], model, max_positions=LENGTH)
    labels: set[str] = set()
    for seed in range(ATTEMPTS):  # a message may be over before it is paused
        client.push(folders["first"], "first", recompute=False)
        sampled = sampled_across(
            client, seed, lambda: client.push(folders["second"], "second", recompute=True)
        )
        labels = {*sampled.labels}
        if len(labels) == 2:
            break
    assert labels == {"first", "second"} and sampled.labels == sorted(sampled.labels)
    rows = np.zeros((12, LENGTH), np.int32)
    rows[0, : len(PROMPT) + len(sampled.tokens)] = [*PROMPT, *sampled.tokens]
    computed = {label: np.asarray(_trainer(model, rows))[0] for label, model in models.items()}
    for at, (token, logprob, label) in enumerate(
        zip(sampled.tokens, sampled.logprobs, sampled.labels, strict=True), len(PROMPT) - 1
    ):
        assert abs(computed[label][at, token] - logprob) < 1e-4


def sampled_across(client: VllmClient, seed: int, push: Callable[[], None]) -> Sampled:
    """A message that is paused after its first tokens, until ``push`` is done."""
    begun = threading.Event()

    def length(tokens: list[int]) -> None:
        if not begun.is_set():
            client._post("/pause?mode=keep", {})
            begun.set()

    count = LENGTH - len(PROMPT)
    sampling = {"max_tokens": count, "ignore_eos": True, "logprobs": 0, "seed": seed}
    sampling |= {"detokenize": False, "temperature": 1.0}
    request = Request(f"message{seed}", PROMPT, sampling, "salt", length, 1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.sample, request)
        assert begun.wait(PATIENCE_S)
        push()
        return future.result()


def test_a_run_trains_and_its_updates_replay(served, tmp_path):
    address, _ = served
    config = make_config(address)
    train(config, tmp_path)
    report = audit.check(tmp_path / STORE, 0)
    assert report.problems == [] and report.consumed == STEPS and report.staleness_max == 0
    rows = read_metrics(tmp_path)
    assert len(rows) == STEPS
    assert all(row["policy/mismatch_max"] < 1e-4 for row in rows)
    assert all(row["train/no_signal"] == 0 for row in rows)  # so each version has other weights
    assert sum(row["engine/hits_groups"] for row in rows) > 0
    with Run(config, tmp_path, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * STEPS
