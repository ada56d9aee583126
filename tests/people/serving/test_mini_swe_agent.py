"""The unmodified package mini-swe-agent as a client of the fleet: it knows a URL and a key alone.

It needs a Python that has the package: MINI_SWE_AGENT_PYTHON=path/to/python, or this one.
"""

from __future__ import annotations

import json
import subprocess
import threading

import numpy as np

from models.sharding import MeshConfig, make_mesh
from people.realtime.training import groups_of
from rl_code.harness.mini_swe_agent import MiniSweAgentHost
from rl_code.types import Reward
from tests.people.serving.conftest import MODEL
from tests.people.serving.scripted import PATIENCE_S, scripted
from tests.rl_code.harness.chats import call, chat_tokenizer, mini_python
from tests.rl_code.harness.test_mini_swe_agent import needs_package
from tests.rl_code.harness.test_rollout import trainer
from tests.rl_code.rollout.small import model_on

pytestmark = needs_package
# What a person writes who uses the package with a server of their own.
CLIENT = """
import importlib, json, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment

job = json.loads(sys.argv[1])
config = get_config_from_spec(job["config"])
of_model = {key: config["model"][key] for key in ("observation_template", "format_error_template")}
of_agent = {key: config["agent"][key] for key in ("system_template", "instance_template")}
module = importlib.import_module(f"minisweagent.models.{job['module']}")
endpoint = {"api_base": job["url"], "api_key": job["key"], "drop_params": True, **job["options"]}
model = getattr(module, job["model"])(
    model_name=f"openai/{job['name']}", model_kwargs=endpoint, **(of_model | job["of_model"])
)
agent = DefaultAgent(
    model, LocalEnvironment(cwd=job["folder"]), cost_limit=0.0, **(of_agent | job["of_agent"])
)
print(json.dumps(agent.run("Write a.txt")))
"""
TOOLS = dict(config="mini.yaml", module="litellm_model", model="LitellmModel")
TEXT = dict(
    config="mini_textbased.yaml",
    module="litellm_textbased_model",
    model="LitellmTextbasedModel",
)


def play(folder, url: str, name: str, **job) -> dict:
    """Runs the package until it has ended; what it says of its end."""
    standard = dict(url=f"{url}/v1", key="ada", name=name, folder=str(folder))
    standard |= dict(options={}, of_model={}, of_agent={})
    done = subprocess.run(
        [mini_python(), "-c", CLIENT, json.dumps(standard | job)],
        env=MiniSweAgentHost.environment(str(folder)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def trained_on(records) -> list:
    """The trajectory of each answer, as a cycle trains on it."""
    zeros = [0.0] * len(records)
    groups, left_out = groups_of(records, zeros, [Reward(0.0, {})] * len(records))
    assert left_out == 0
    return [group.trajectories[0] for group in groups]


def test_the_package_hands_in_and_the_records_are_what_the_engine_was_given(tmp_path):
    says = [
        call("echo right > a.txt && cat a.txt"),
        "I am done.<|im_end|>",  # no call: the package leaves it out of its history
        call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    given = []
    with scripted() as made:
        service = made.services[1]
        service.at_once = False
        service.length = service.pages = 20_000  # the package's prompt is long

        def answer():
            for text in says:
                job = service.wait_job()
                given.append(list(job.prompts[0]))
                service.answer(job, text.removesuffix("<|im_end|>"))

        thread = threading.Thread(target=answer)
        thread.start()
        said = play(tmp_path, made.endpoint.url, "policy", **TOOLS)
        thread.join(PATIENCE_S)
        user = made.fleet.user_of("ada")
    assert said["exit_status"] == "Submitted"
    assert (tmp_path / "a.txt").read_text() == "right\n"
    records = made.records
    assert {record.user for record in records} == {user}
    assert len({record.session for record in records}) == 1
    assert [record.finish_reason for record in records] == ["tool_calls", "stop", "tool_calls"]
    # its history goes on word by word, so what was sampled is kept and never tokenised again
    first = len(records[0].given) + len(records[0].tokens)
    assert (records[1].context, records[1].kept) == (0, first)
    assert (records[2].context, records[2].parent) == (1, 0) and records[2].kept >= first
    for trajectory, prompt, text in zip(trained_on(records), given, says, strict=True):
        assert trajectory.tokens.tolist() == prompt + chat_tokenizer().encode(text)
        assert trajectory.prompt_length == len(prompt)
        assert trajectory.sampled.tolist() == [
            at >= len(prompt) for at in range(len(trajectory.tokens))
        ]
    seen = chat_tokenizer().decode(given[1])
    assert '"name": "bash"' in seen and "right" in seen


def test_what_it_was_answered_is_what_training_computes(served, tmp_path):
    """By a real engine with a random model, whose messages are no commands."""
    endpoint, _, records = served
    before = len(records)
    short = dict(system_template="Answer.", instance_template="{{task}}")
    said = play(
        tmp_path,
        endpoint.url,
        "tiny",
        key="mini",
        options=dict(max_tokens=12),
        of_model=dict(format_error_template="again"),
        of_agent=dict(**short, max_consecutive_format_errors=3),
        **TEXT,
    )
    assert said["exit_status"] == "RepeatedFormatError"
    mine = records[before:]
    assert len(mine) == 3 and all(record.tokens for record in mine)
    model = model_on(make_mesh(MeshConfig(data=1, tensor=1)), MODEL)
    for trajectory in trained_on(mine):
        row = np.zeros((1, 512), np.int32)
        row[0, : len(trajectory.tokens)] = trajectory.tokens
        places = np.flatnonzero(trajectory.sampled)
        predicted = np.asarray(trainer(model, row))[0][places - 1, trajectory.tokens[places]]
        recorded = trajectory.logprobs[places]
        np.testing.assert_allclose(recorded, predicted, rtol=1e-3, atol=1e-4)
