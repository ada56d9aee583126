"""The API over HTTP: training, samples, futures over restarts, limits, errors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from models.sharding import use_mesh
from people.serving.tinker import adapters
from people.serving.tinker.history import Asked
from people.serving.tinker.trainer import Trainer
from tests.people.serving.tinker.api import (
    datum,
    forward,
    logprobs_of,
    make_trainer,
    mesh,
    metrics_of,
    optim,
    replay,
    samples_of,
    server,
)

PYTHON = os.environ.get("TINKER_PYTHON", "")

needs_package = pytest.mark.skipif(
    not PYTHON,
    reason="no Python with tinker: python -m venv tk; tk/bin/pip install tinker==0.38.0; "
    "TINKER_PYTHON=tk/bin/python",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with server(tmp_path_factory.mktemp("tinker")) as found:
        yield found


@pytest.mark.long
def test_an_adapter_learns_and_its_samples_have_the_trainers_log_probabilities(served):
    model = served.model(served.session(), rank=4)
    tokens = [20, 21, 22, 23, 24]
    losses = []
    for number in range(1, 21, 2):
        future = served.train(model, number, tokens)
        served.result(served.step(model, number + 1, rate=0.01))
        losses.append(metrics_of(served.result(future))["loss:sum"])
    assert losses[-1] < 0.8 * losses[0]
    saved = served.result(
        served.ask("save_weights_for_sampler", dict(model_id=model, seq_id=21, path="final"))
    )
    session = model.partition(":")[0]
    sampler = served.ask(
        "create_sampling_session",
        dict(session_id=session, sampling_session_seq_id=0, model_path=saved["path"]),
    )["sampling_session_id"]
    asked = dict(
        sampling_session_id=sampler,
        seq_id=0,
        num_samples=2,
        prompt={"chunks": [{"type": "encoded_text", "tokens": tokens[:2]}]},
        sampling_params=dict(max_tokens=3, temperature=0.0, seed=1),
        prompt_logprobs=True,
    )
    one, other = samples_of(served.result(served.ask("asample", asked)))
    assert one[:2] == other[:2] and len(one[1]) == 3  # both take the most likely tokens
    whole = [*tokens[:2], *one[1]]
    body = forward(model, 22, [datum(whole)], only=True)
    (trained,) = logprobs_of(served.result(served.ask("forward_backward", body)))
    np.testing.assert_allclose(trained[1:], one[2], atol=2e-4)
    stop = dict(max_tokens=3, stop=[one[1][0]], temperature=0.0)
    asked = dict(asked, seq_id=1, sampling_params=stop)
    found = samples_of(served.result(served.ask("asample", asked)))
    assert found[0][:2] == (0, one[1][:1])


def test_importance_sampling_at_ratio_one_has_the_loss_minus_the_advantages(served):
    model = served.model(served.session())
    tokens = [3, 4, 5, 6]
    body = forward(model, 1, [datum(tokens)], only=True)
    (logprobs,) = logprobs_of(served.result(served.ask("forward_backward", body)))
    given = datum(tokens, logprobs=logprobs, advantages=[1.0, -2.0, 4.0])
    for number, loss in ((2, "importance_sampling"), (3, "ppo")):
        body = forward(model, number, [given], loss)
        metrics = metrics_of(served.result(served.ask("forward_backward", body)))
        assert metrics["loss:sum"] == pytest.approx(-3.0, rel=1e-4)


def test_requests_wait_for_those_before_them_and_come_once(served):
    model = served.model(served.session())
    late = served.step(model, 2)
    assert served.trainer.history.result(late["request_id"]) is None
    served.train(model, 1)
    first = served.result(late)
    assert served.step(model, 2, rate=0.5) == late  # the first one that came counts
    assert served.result(late) == first
    assert served.trainer.models[model].state.steps == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (dict(loss="gspo"), "loss_fn='gspo' is not served here"),
        (dict(config={"clip": 1.0}), "loss_fn_config has 'clip'; cross_entropy has nothing"),
        (dict(loss="ppo"), "ppo needs ['target_tokens', 'logprobs', 'advantages']"),
        (dict(tokens=[1, 999999]), "must hold tokens from 0 to"),
        (dict(tokens=[1] * 300), "has 299 tokens; there must be 1 to 200"),
    ],
)
def test_a_wrong_request_fails_by_name_and_the_next_one_is_carried_out(served, body, words):
    model = served.model(served.session())
    wrong = served.result(served.train(model, 1, **body))
    assert words in wrong["error"] and wrong["category"] == "user"
    assert "without a gradient" in served.result(served.step(model, 2))["error"]
    served.train(model, 3)
    assert served.result(served.step(model, 4))["metrics"]["step"] == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(topk_prompt_logprobs=2), "topk_prompt_logprobs=2 is not served"),
        (dict(num_samples=0), "num_samples=0 must be from 1"),
        (dict(sampling_params=dict(top_k=5)), "top_k=5 is not served"),
        (dict(sampling_params=dict(stop=[])), "stop=[] is not served"),
        (dict(prompt=dict(chunks=[dict(type="image")])), "has the type 'image'"),
        (dict(prompt=dict(chunks=[])), "the prompt must hold tokens"),
    ],
)
def test_a_wrong_request_for_samples_fails_by_name(served, change, words):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    asked = dict(base_model="tiny", prompt=prompt, sampling_params=dict(max_tokens=2)) | change
    assert words in served.result(served.ask("asample", asked))["error"]


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (dict(rank=99), "rank=99 must be from 1 to 4"),
        (dict(train_mlp=False, train_attn=False), "adapters of the unembedding alone"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(served, lora, words):
    asked = dict(session_id=served.session(), model_seq_id=0, base_model="tiny")
    asked["lora_config"] = {"rank": 2, **lora}
    assert words in served.result(served.ask("create_model", asked))["error"]


def test_a_model_is_found_by_its_folder_through_a_link_too(served, tmp_path):
    folder = served.trainer.history.folder
    (tmp_path / "link").symlink_to(folder)
    asked = dict(session_id=served.session(), model_seq_id=0, lora_config={"rank": 2})
    made = served.ask("create_model", asked | dict(base_model=str(tmp_path / "link")))
    assert served.result(made)["model_id"]
    status, found = served.send("create_model", asked | dict(base_model=str(tmp_path)))
    assert status == 404 and "is not served here; there is tiny" in found["error"]["message"]


def test_what_belongs_to_another_key_is_not_found(served):
    model = served.model(served.session())
    served.key = "eve"
    try:
        for path, body in (
            ("optim_step", optim(model, 1)),
            ("get_info", dict(model_id=model)),
            ("retrieve_future", dict(request_id=f"{model}:0")),
            ("retrieve_future", dict(request_id="../../etc/passwd")),
            ("create_model", dict(session_id=model.partition(":")[0], base_model="tiny")),
        ):
            assert served.send(path, body)[0] == 404
    finally:
        served.key = "ada"


def test_a_state_is_loaded_with_and_without_its_optimizer(served):
    session = served.session()
    model = served.model(session)
    served.train(model, 1)
    served.step(model, 2)
    asked = dict(model_id=model, seq_id=3, path="one")
    saved = served.result(served.ask("save_weights", asked))["path"]
    assert saved == f"tinker://{model}/weights/one"
    states = {}
    for number, optimizer in ((1, True), (2, False)):
        asked = dict(session_id=session, model_seq_id=number, path=saved, optimizer=optimizer)
        made = served.result(served.ask("load_weights", asked))["model_id"]
        states[optimizer] = served.trainer.models[made].state
    before = served.trainer.models[model].state
    assert {adapters.digest(x) for x in states.values()} == {adapters.digest(before)}
    assert (int(states[True].moments.count), int(states[False].moments.count)) == (1, 0)
    listed = served.ask(f"training_runs/{model}/checkpoints", method="GET")["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [saved]
    again = served.result(served.ask("save_weights", dict(model_id=model, seq_id=4, path="one")))
    assert "is there already" in again["error"]
    served.ask(f"training_runs/{model}/checkpoints/weights/one", method="DELETE")
    asked = dict(model_id=model, seq_id=5, path=saved, optimizer=True)
    assert "is no checkpoint" in served.result(served.ask("load_weights", asked))["error"]


def test_futures_outlive_a_restart_and_nothing_is_done_twice(tmp_path):
    with server(tmp_path) as first:
        model = first.model(first.session())
        for number in range(1, 8, 2):
            first.train(model, number)
            last = first.step(model, number + 1)
        done = first.result(last)
        digest = adapters.digest(first.trainer.models[model].state)
        third = first.train(model, 9)
        first.result(third)
    # a request that was accepted, and a process that died before it was carried out
    trainer = make_trainer(tmp_path)
    body = json.dumps(optim(model, 10)).encode()
    trainer.history.accept(Asked(f"{model}:10", "optim_step", trainer.models[model].user, 0, body))
    trainer.history.close()
    with server(tmp_path) as second:
        assert second.result(last) == done
        assert second.step(model, 8) == last
        assert second.result({"request_id": f"{model}:10"})["metrics"]["step"] == 5.0
        assert adapters.digest(replay(second.trainer, model, 8)) == digest
        whole = replay(second.trainer, model)
        assert adapters.digest(whole) == adapters.digest(second.trainer.models[model].state)


def test_two_adapters_are_computed_in_one_batch_and_replayed_bit_for_bit(tmp_path):
    with server(tmp_path, paused=True) as served:
        session = served.session()
        models = [f"{session}:train:{number}" for number in range(2)]
        asked = dict(session_id=session, base_model="tiny")
        for number, rank in ((0, 2), (1, 4)):
            config = {"rank": rank, "seed": number}
            served.ask("create_model", dict(asked, model_seq_id=number, lora_config=config))
        trainer = served.trainer
        with use_mesh(mesh()):  # as the trainer's thread
            for request in list(trainer._creating):
                trainer._begin(request, None)
        for model in models:
            served.train(model, 1)
            served.step(model, 2)
        with trainer:
            for model in models:
                served.result({"request_id": f"{model}:2"})
        assert trainer.mixed == {2: 1}
        for model in models:
            state = trainer.models[model].state
            assert adapters.digest(replay(trainer, model)) == adapters.digest(state)


def test_a_record_that_was_changed_is_not_replayed_silently(tmp_path):
    with server(tmp_path) as served:
        model = served.model(served.session())
        served.train(model, 1)
        served.result(served.step(model, 2))
        path = served.trainer.history._path(f"{model}:2", "request")
        path.write_bytes(path.read_bytes().replace(b"0.01", b"0.02"))
        with pytest.raises(ValueError, match="the weights are not those on record"):
            replay(served.trainer, model)


def test_a_result_that_was_told_stays_when_its_snapshot_finds_a_full_disk(tmp_path, monkeypatch):
    def full(trainer, model):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "_snapshot", full)
    with server(tmp_path) as served:
        model = served.model(served.session())
        for number in (1, 3):
            served.train(model, number)
            served.step(model, number + 1)
        served.trainer._thread.join(600)
        assert served.trainer.history.result(f"{model}:4").error == ""
        assert isinstance(served.trainer.error, OSError)
        status, told = served.send("retrieve_future", {"request_id": f"{model}:4"})
        assert status == 200 and told["metrics"]["step"] == 2.0
        served.train(model, 5)
        status, told = served.send("retrieve_future", {"request_id": f"{model}:5"})
        assert status == 503 and "No space left on device" in told["error"]["message"]


def test_a_key_over_its_limit_is_told_to_wait(tmp_path):
    keys = tmp_path / "keys.toml"
    hashed = hashlib.sha256(b"ada").hexdigest()
    keys.write_text(f'[[keys]]\nsha256 = "{hashed}"\nrequests_per_minute = 2\n')
    with server(tmp_path / "tinker", keys) as served:
        model = served.model(served.session())
        served.result(served.train(model, 1))
        status, body = served.send("optim_step", optim(model, 2))
        assert status == 429 and "2 answers per minute" in body["error"]["message"]
        served.key = "nobody"
        assert served.send("create_session", {"tags": []})[0] == 401


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
