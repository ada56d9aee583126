"""Models that were trained with documents are served with them: by the mask of training, each
document read once in an organisation, and by no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from people.realtime.training import groups_of
from people.serving.access import Access, KeyFile
from people.serving.fleet import Fleet
from people.serving.service import Service
from people.serving.warm_up import warm_up
from rl_code.environment.documents import DocumentsConfig, check_layout
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.rollout.disk_pages import DiskPages
from rl_code.rollout.engine import Engine
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.run.serving import ServingConfig
from rl_code.types import Reward
from tests.late import Late
from tests.people.serving.conftest import MODEL
from tests.people.serving.scripted import openai_client
from tests.people.serving.test_origins import entry
from tests.rl_code.harness.chats import chat_tokenizer
from tests.rl_code.harness.test_rollout import ENGINE
from tests.rl_code.rollout.small import model_on
from tests.rl_code.rollout.with_documents import trainer_logprobs

openai = Late("openai")


DOCUMENTS = DocumentsConfig(longest=64, shortest=8, page=8)
LENGTH = 800
SHAPES = dataclasses.replace(
    ENGINE,
    prompt_length=LENGTH,
    length=LENGTH,
    longest_document=DOCUMENTS.longest,
    pages=400,
    view_block=200,  # few blocks of the view, of which each is compiled
)
FILE = "".join(f"def f{number}(): return {number}\n" for number in range(6))
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@functools.cache
def engine(pages: int = SHAPES.pages, host_mb: float | None = None) -> Engine:
    tokenizer = chat_tokenizer()
    stops = tuple(sorted(tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")))
    shapes = dataclasses.replace(SHAPES, pages=pages, host_pages_mb=host_mb)
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    return Engine(MODEL, shapes, SamplingConfig(), stops, mesh)


class Server:
    """A server and what it recorded."""

    def __init__(self, stack, keys=None, disk=None, config=MODEL, **shapes):
        self.engine = engine(**shapes)
        self.records = []
        self.schedulers = []

        def service(weights, version):
            threads = dict(workers=2, worker_deadline_s=600.0)
            self.schedulers.append(Scheduler(self.engine, chat_tokenizer(), **threads, disk=disk))
            protocol = PROTOCOLS["hermes"]
            return Service(self.schedulers[-1], weights, version=version, protocol=protocol)

        self.fleet = stack.enter_context(
            Fleet(
                service,
                protocol=PROTOCOLS["hermes"],
                tokenizer=chat_tokenizer(),
                secret=bytes(32),
                config=ServingConfig(),
                on_answer=self.records.append,
                documents=DOCUMENTS,
                document_tools=["look"],
            )
        )
        self.fleet.models.load("tiny", 7, model_on(self.engine.mesh, config))
        access = Access(self.fleet, keys)
        self.endpoint = stack.enter_context(Endpoint(access.find))

    def ask(self, messages, key="ada", **options):
        """The message of an answer that is drawn by a seed, and what it found (``found``)."""
        client = openai_client(f"{self.endpoint.url}/v1", key)
        options = dict(max_tokens=6, seed=3, tools=[LOOK], logprobs=True) | options
        answer = client.chat.completions.create(model="tiny", messages=messages, **options)
        client.close()
        return answer.choices[0].message

    def found(self):
        """(documents, those that had not to be read) since the last call."""
        stats = self.schedulers[0].take_stats()
        return stats.documents, stats.documents_found

    def last(self):
        return self.records[-1].tokens, self.records[-1].logprobs


def looked_at(text, more=()):
    """A conversation in which the agent has read a file."""
    return [
        {"role": "user", "content": "mend it"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
        *more,
    ]


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def alone(conversation, **options):
    """Tokens and log-probabilities of an answer by a server that has read nothing before."""
    with contextlib.ExitStack() as stack:
        server = Server(stack)
        server.ask(conversation, **options)
        return server.last()


def assert_trained_alike(server):
    """The log-probabilities of all answers are those that an update computes."""
    records = server.records
    groups, left_out = groups_of(records, [0.0] * len(records), [Reward(0.0, {})] * len(records))
    assert not left_out
    trajectories = [group.trajectories[0] for group in groups]
    model = model_on(server.engine.mesh, MODEL)
    # as many rows each time, so that one program computes them
    rows = (trajectories * 4)[:4]
    found = trainer_logprobs(rows, model, LENGTH, DOCUMENTS.longest)
    for row, t in zip(found, rows, strict=True):
        check_layout(t.documents, DOCUMENTS)
        predicted = row[np.arange(len(t.tokens) - 1), t.tokens[1:]]
        sampled = t.sampled[1:]
        assert sampled.any()
        np.testing.assert_allclose(t.logprobs[1:][sampled], predicted[sampled], 1e-3, 1e-4)


def test_sessions_with_documents_are_sampled_as_the_trainer_computes(stack):
    server = Server(stack)
    session = looked_at(FILE)
    answered = server.ask(session, n=2)
    session.append({"role": "assistant", "content": answered.content})
    parts = [
        {"type": "text", "text": "see this too: "},
        {"type": "document", "text": FILE[::-1]},
        {"type": "document", "text": "short"},
        {"type": "text", "text": "and say"},
    ]
    server.ask([*session, {"role": "user", "content": parts}])
    # another branch of the session, which keeps the beginning
    server.ask([*session, {"role": "user", "content": "no"}])
    assert_trained_alike(server)
    kinds = [set(record.kinds) for record in server.records]
    assert max(kinds[0]) >= 2 and max(kinds[2]) > max(kinds[0])  # longer than one document
    assert server.records[2].kept and kinds[3] == {0}
    # the same text without the mask is another context
    server.ask([*session[:-2], session[-2] | {"content": [{"type": "text", "text": FILE}]}])
    assert set(server.records[-1].kinds) == {0}


def test_open_files_stand_before_a_completion_as_documents(stack):
    server = Server(stack)
    client = openai_client(f"{server.endpoint.url}/v1")
    ask = dict(model="tiny", max_tokens=5, seed=1)
    files = dict(extra_body={"documents": [FILE, "x = 1\n" * 3]})
    client.completions.create(prompt="def g():", **ask, **files)
    first = server.last()
    client.completions.create(prompt="def h():", **ask, **files)
    assert_trained_alike(server)
    assert server.found() == (6, 3)
    with pytest.raises(openai.BadRequestError, match="must be a list of texts"):
        client.completions.create(prompt="def g():", **ask, extra_body={"documents": FILE})
    client.completions.create(prompt="def g():", **ask, **files)
    assert server.last() == first
    client.close()


def test_a_document_is_read_once_by_an_organisation_and_again_by_others(stack, tmp_path):
    file = tmp_path / "keys.toml"
    owners = {"ann": "acme", "bob": "acme", "cyd": "other", "dan": "", "eve": ""}
    file.write_text("".join(entry(*pair) for pair in owners.items()))
    disk = DiskPages(tmp_path / "documents", 2**20, 3600.0)
    server = Server(stack, KeyFile(file), disk)
    count = -(-len(chat_tokenizer().encode(FILE)) // DOCUMENTS.longest)
    found = []
    for key in owners:
        server.ask(looked_at(FILE), key)
        stats = server.schedulers[0].take_stats()
        prefix = stats.found_in_tasks > 0  # what stands before the document is found as well
        found.append((stats.documents, stats.documents_found, prefix))
    answers = {(record.tokens, record.logprobs) for record in server.records}
    assert answers == {alone(looked_at(FILE))}
    none, all_of_them = (count, 0, False), (count, count, True)
    assert found == [none, all_of_them, none, none, all_of_them]
    disk.wait()
    folders = {path.name for path in (tmp_path / "documents").iterdir()}
    assert len(folders) == 3 and not folders & set(owners.values())
    # a file that has changed is another document, and what did not change of it is not
    changed = FILE.replace("return 5", "return 6")
    server.ask(looked_at(changed), "ann")
    assert server.found() == (count, count - 1)
    assert server.last() == alone(looked_at(changed))


@pytest.mark.long
def test_documents_come_back_from_the_host_and_from_the_disk(stack, tmp_path):
    small = dict(pages=130, host_mb=64)
    texts = [FILE.replace("f", name) for name in "abcdef"]
    expected = [alone(looked_at(text)) for text in texts[:2]]
    disk = DiskPages(tmp_path, 2**20, 3600.0)
    server = Server(stack, disk=disk, **small)
    for text in texts:
        server.ask(looked_at(text))
    assert server.schedulers[0].take_stats().pages_to_host
    server.ask(looked_at(texts[0]))
    assert server.last() == expected[0]
    asked, found = server.found()
    assert asked == found
    disk.wait()
    # another process: only the files are left
    again = Server(stack, disk=DiskPages(tmp_path, 2**20, 3600.0))
    again.ask(looked_at(texts[1]))
    assert again.last() == expected[1]
    asked, found = again.found()
    assert asked == found
    # a spoiled file is computed again
    for path in tmp_path.glob("*/*.keys"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    third = Server(stack, disk=DiskPages(tmp_path, 2**20, 3600.0))
    third.ask(looked_at(texts[1]))
    assert third.found()[1] == 0 and third.last() == expected[1]


def test_files_go_when_there_is_no_room_and_when_they_are_old(tmp_path):
    disk = DiskPages(tmp_path, 600, 3600.0)
    for number in range(4):
        disk.keep("acme", f"{number}", [[np.full((1, 50), number, np.int32)]])
        disk.wait()
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["2.keys", "3.keys"]
    assert disk.find("acme", "0") is None and disk.find("other", "3") is None
    assert disk.find("acme", "2") == np.full(50, 2, np.int32).tobytes()
    # the one that was used last stays, in another process too
    assert [*DiskPages(tmp_path, 300, 3600.0)._sizes] == [tmp_path / "acme" / "2.keys"]
    assert DiskPages(tmp_path, 600, 0.0).find("acme", "2") is None
    assert not [*tmp_path.glob("*/*")]


@pytest.mark.long
def test_a_warm_server_compiles_nothing_for_a_document(stack):
    server = Server(stack)
    warm_up(server.fleet.models.services[0])
    before = server.engine._prefill._cache_size(), server.engine._decode._cache_size()
    server.ask(looked_at(FILE))
    server.ask(looked_at("x = 12345\n"))
    assert before == (server.engine._prefill._cache_size(), server.engine._decode._cache_size())
