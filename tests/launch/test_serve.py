"""The program serves a run's weights, records what it answers, and ends when it is told to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading

import openai
import pytest

from rl_code.feedback.identity import AnswerIds, load_secret, user_key

PATIENCE_S = 300.0


@pytest.mark.long
def test_answers_on_their_way_end_before_the_server_does(tmp_path):
    record, secret = tmp_path / "answers.jsonl", tmp_path / "secret"
    command = [sys.executable, "-m", "launch.serve", "--config=configs/quickstart.py:smoke"]
    command += ["--port=0", f"--record={record}", f"--secret={secret}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        timer = threading.Timer(PATIENCE_S, server.kill)
        timer.start()
        try:
            lines = iter(server.stdout.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
            client = openai.OpenAI(base_url=url, api_key="ada", max_retries=0, timeout=PATIENCE_S)
            stream = client.completions.create(
                model="policy", prompt="def f(x):\n", max_tokens=60, stream=True
            )
            parts = iter(stream)
            texts = [next(parts).choices[0].text]  # it has begun
            server.send_signal(signal.SIGTERM)
            chunks = list(parts)
            texts += [chunk.choices[0].text for chunk in chunks]
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
            assert server.wait() == 0
        finally:
            timer.cancel()
            server.kill()
    (answer,) = map(json.loads, record.read_text().splitlines())
    key = load_secret(secret)
    assert answer["user"] == user_key(key, "ada")
    assert AnswerIds(key).issued_to(answer["id"], answer["user"])
    assert answer["id"] == chunks[-1].id and len(answer["logprobs"]) == len(answer["tokens"])
    assert answer["finish_reason"] in ("stop", "length")
