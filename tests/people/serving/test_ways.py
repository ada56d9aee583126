"""Answers that a client has sampled in its own way: greedy, biased, as JSON, with alternatives."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from people.realtime.training import groups_of
from people.serving.warm_up import Trial
from people.serving.ways import Way
from rl_code.harness.endpoint.completions import read_completion
from rl_code.harness.endpoint.grammars import Grammars, json_grammar
from rl_code.rollout.sampling import SamplingConfig
from rl_code.types import Reward
from tests.late import Late
from tests.people.serving.scripted import openai_client
from tests.rl_code.harness.chats import chat_tokenizer

openai = Late("openai")


PATIENCE_S = 300.0
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "y"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(served):
    with openai_client(f"{served[0].url}/v1", "ways", timeout=PATIENCE_S) as made:
        yield made


def test_temperature_0_takes_the_most_likely_tokens_and_is_not_trained_on(served, client):
    options = dict(model="tiny", messages=HELLO, temperature=0, max_tokens=8)
    body = client.chat.completions.create(logprobs=True, top_logprobs=3, **options)
    record = served[2][-1]
    assert record.extra["sampling"] == {"temperature": 0.0}
    for token in body.choices[0].logprobs.content:
        first, *others = token.top_logprobs
        assert len(others) == 2 and (first.token, first.logprob) == (token.token, token.logprob)
        assert all(other.logprob <= first.logprob for other in others)
    again = client.chat.completions.create(**options)
    assert again.choices[0].message.content == body.choices[0].message.content
    sampled = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, seed=1, store=False, metadata={"for": "me"}
    )
    own = served[2][-1]
    assert own.id == sampled.id and own.extra["metadata"] == {"for": "me"}
    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=1, user="ann")
    plain = served[2][-1]
    assert plain.tokens == own.tokens and "ann" not in json.dumps(plain.extra)
    answers = [record, own, plain]
    groups, left_out = groups_of(answers, [1.0] * 3, [Reward(1.0, {})] * 3)
    assert [group.task.id for group in groups] == [plain.id] and left_out == 2


def test_an_answer_has_the_schema_that_was_asked_for(served, client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    body = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=form, n=2, seed=3, max_tokens=60
    )
    for choice in body.choices:
        found = json.loads(choice.message.content)
        assert found.keys() == {"ok", "kind"} and found["kind"] in ("x", "y")
        assert choice.finish_reason == "stop"
    form["json_schema"]["schema"] = {"type": "int"}
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        client.chat.completions.create(model="tiny", messages=HELLO, response_format=form)


def test_biases_and_penalties_are_added_to_the_logits(served, client):
    token = chat_tokenizer().encode("Z")[0]
    options = dict(model="tiny", prompt="a b c", max_tokens=5)
    body = client.completions.create(logit_bias={str(token): 100}, **options)
    assert body.choices[0].text == "ZZZZZ"
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(logit_bias={"99999999": 1}, **options)
    request = read_completion(b'{"prompt": "a", "presence_penalty": 1, "frequency_penalty": 0.5}')
    way = Way(request, SamplingConfig(), None)
    logits, allowed = np.zeros(6, np.float32), np.ones(6, bool)
    way.prepare([2, 4, 4], logits, allowed)
    np.testing.assert_allclose(logits, [0, 0, -1.5, 0, -2.0, 0])
    assert way.one_by_one


def test_log_probabilities_spell_the_content_and_no_more(served, client):
    options = dict(model="tiny", messages=HELLO, seed=21, max_tokens=40, logprobs=True)
    whole = client.chat.completions.create(**options).choices[0].message.content
    stop = whole[5:8]
    (choice,) = client.chat.completions.create(stop=stop, **options).choices
    assert choice.message.content == whole[: whole.index(stop)]
    spelled = "".join(token.token for token in choice.logprobs.content)
    assert spelled == choice.message.content
    assert all(math.isfinite(token.logprob) for token in choice.logprobs.content)


def test_hints_that_change_nothing_are_named_in_the_answer(client):
    asked = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=2, reasoning_effort="high", verbosity="low"
    )
    assert asked.headers["x-unheeded"] == "reasoning_effort, verbosity"


def test_programs_are_compiled_before_others_ask(served):
    _, fleet, records = served
    (service,) = fleet.models.services
    before = len(records)
    fleet.warm_up()
    engine = service._scheduler.engine
    programs = engine._prefill, engine._decode, engine._copy
    compiled = [program._cache_size() for program in programs]
    warmer = read_completion(b'{"prompt": "a", "temperature": 0.5}')
    for ways in (None, [Way(warmer, SamplingConfig(), None)] * 2):
        for length in (5, 300):
            trial = Trial(length, ways)
            service.submit(trial).result()
            trial.done.result(PATIENCE_S)
    assert [program._cache_size() for program in programs] == compiled
    assert len(records) == before


def test_guesses_that_fit_a_schema_are_kept():
    tokenizer = chat_tokenizer()
    grammars = Grammars(tokenizer, [tokenizer.token_id("<|im_end|>")])
    (answer,) = grammars.start(json_grammar(json.dumps(SCHEMA)), 1)
    request = read_completion(b'{"prompt": "a"}')
    way = Way(request, SamplingConfig(), answer)
    fits = tokenizer.encode('{"ok": true, "kind": "')
    assert way.kept(fits) == len(fits) and way.redrawn == 0
    wrong = tokenizer.encode("x") + tokenizer.encode("nothing")
    assert way.kept(wrong) == 1 and way.redrawn == 1
    allowed = np.ones(tokenizer.vocab_size + 2, bool)
    way.prepare([], np.zeros(len(allowed), np.float32), allowed)
    spelled = {tokenizer.decode([token]) for token in np.flatnonzero(allowed)}
    assert '"' in spelled and all(text.startswith('"') for text in spelled)
