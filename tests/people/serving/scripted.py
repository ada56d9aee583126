"""A fleet whose engines sample what the test says, and clients of it over real HTTP."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

from people.serving.access import Access
from people.serving.fleet import Fleet
from people.serving.probes import probes
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.completions import FillInTheMiddle
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.rollout.sampling import SamplingConfig
from rl_code.run.serving import ServingConfig
from tests.late import Late
from tests.rl_code.harness.chats import chat_tokenizer

openai = Late("openai")

SECRET = bytes(range(32))
# Seconds that a test waits for what must happen, on the slowest machine.
PATIENCE_S = 120.0


def openai_client(url, key="ada", **options):
    """A client of the package openai. It reads no certificates, which takes it longer than most
    answers, and of which loopback has no use.
    """
    settings = dict(base_url=url, max_retries=0, timeout=PATIENCE_S)
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(api_key=key, http_client=http, **settings | options)


class ScriptedService:
    """Takes the place of ``service.Service``: a job waits until the test answers it."""

    length = 200
    page = 4
    pages = 100
    error = None

    def __init__(self, weights, version):
        self.weights, self.version = weights, version
        self.sampling = SamplingConfig()
        self.jobs = []
        self.closed = False
        # Whether jobs are answered at once, by the words of ``weights``.
        self.at_once = True
        self._changed = threading.Condition()

    def submit(self, job):
        future = Future()
        future.set_result(None)
        with self._changed:
            self.jobs.append(job)
            self._changed.notify_all()
        if self.at_once:
            threading.Thread(target=self.answer, args=(job,)).start()
        return future

    def wait_job(self, count=1):
        """The newest job, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.jobs) >= count, PATIENCE_S)
            return self.jobs[-1]

    def answer(self, job, text=None):
        """Answers a job with the words of the weights."""
        tokens = chat_tokenizer().encode(f"{text or self.weights}<|im_end|>")
        for index in range(len(job.prompts)):
            for end in range(1, len(tokens)):
                job.sampled(index, tokens[:end])
            job.answered(index, tokens, [-0.5] * len(tokens))
        self._over(job)

    def cancel(self, job):
        """Cuts a job off after its first token."""
        if self._over(job):
            for index in range(len(job.prompts)):
                token = chat_tokenizer().encode(str(self.weights))[:1]
                job.sampled(index, token)
                job.cut_off(index, token, [-0.5])

    def close(self):
        self.closed = True
        for job in list(self.jobs):
            self.cancel(job)

    def _over(self, job):
        with self._changed:
            if job not in self.jobs:
                return False
            self.jobs.remove(job)
            self._changed.notify_all()
            return True

    def wait_none(self):
        """Waits until no job is left."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self.jobs, PATIENCE_S)


class Scripted:
    """A fleet with its engines by version, the records of answers, and a server in front of it."""

    def __init__(self, stack, *, keys=None, on_answer=None, begun=None, routes=(), **config):
        self.services = {}
        self.records = []

        def service(weights, version):
            self.services[version] = ScriptedService(weights, version)
            return self.services[version]

        self.fleet = Fleet(
            service,
            protocol=PROTOCOLS["hermes"],
            tokenizer=chat_tokenizer(),
            secret=SECRET,
            config=ServingConfig(fill_in=FillInTheMiddle(), **config),
            on_answer=on_answer or self.records.append,
            begun=begun,
        )
        self.access = Access(self.fleet, keys)
        stack.enter_context(self.fleet)
        all_routes = [*probes(self.fleet), *routes]
        on_error = self.fleet.metrics.refused
        self.endpoint = Endpoint(self.access.find, routes=all_routes, on_error=on_error)
        stack.enter_context(self.endpoint)
        self.load = self.fleet.models.load


@contextlib.contextmanager
def scripted(**options):
    """A scripted fleet that serves version 1 of "policy", whose answers say "one"."""
    with contextlib.ExitStack() as stack:
        made = Scripted(stack, **options)
        made.load("policy", 1, "one")
        yield made
