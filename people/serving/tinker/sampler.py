"""Samples from saved adapters and from the base model, all in the same batches of the engine."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal

import numpy as np

from models.lora import Adapters
from models.tokenizer import Tokenizer
from people.serving.models import Loaded, Models
from people.serving.tinker import adapters
from people.serving.tinker.checkpoints import Checkpoint, Checkpoints
from people.serving.tinker.history import Asked, Result
from people.serving.tinker.trainer import Trainer, failed
from people.serving.tinker.wire import LENGTH, STOP, write_samples
from people.serving.ways import make_ways
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.fields import ApiError, Request
from rl_code.rollout.own_way import OwnWay

# The most samples of one request.
MOST_SAMPLES = 1024
# Fields of a request that ask for what is not served, and the value that asks for nothing.
_REFUSED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "target_prompt_logprobs": None,
    "record_stability_info": False,
}
_SLOT = "tinker-room"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest(Request):
    """The settings of a request for samples, as the engine reads them."""

    kind: ClassVar[Literal["chat", "completion"]] = "completion"
    # Tokens that end a sample, beside the model's own.
    stop_tokens: tuple[int, ...] = ()


class Sampling:
    """A request for samples in the engine (``service.EngineRequest``)."""

    def __init__(
        self,
        request: SampleRequest,
        prompt: Sequence[int],
        adapter: int,
        owner: str,
        ways: Sequence[OwnWay] | None,
        on_end: Callable[[list[tuple[list[int], list[float]] | None]], None],
    ):
        self.request: Request = request
        self.prompts: Sequence[list[int]] = [list(prompt)] * request.n
        self.kinds: Sequence[list[int]] | None = None
        self.adapter, self.owner = adapter, owner
        self.ways: Sequence[OwnWay] | None = ways
        self._found: list[tuple[list[int], list[float]] | None] = [None] * request.n
        self._left = request.n
        self._on_end = on_end
        self._lock = threading.Lock()

    def sampled(self, index: int, tokens: Sequence[int]) -> None:
        """Nothing is streamed."""

    def answered(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        self._end(index, ([int(x) for x in tokens], [float(x) for x in logprobs]))

    def cut_off(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        self._end(index, None)

    def _end(self, index: int, found: tuple[list[int], list[float]] | None) -> None:
        with self._lock:
            self._found[index] = found
            self._left -= 1
            last = self._left == 0
        if last:
            self._on_end(self._found)


class Sampler:
    """Carries requests for samples out.

    base: the model, as ``name@version`` of ``models``. on_end: called with (request, its result, or
    None where it was cut off; the tokens that it took).
    """

    def __init__(
        self,
        models: Models,
        base: str,
        trainer: Trainer,
        checkpoints: Checkpoints,
        text: ChatText,
        tokenizer: Tokenizer,
        on_end: Callable[[Asked, Result | None, int], None],
    ):
        self._models, self._base = models, base
        self._trainer, self._checkpoints = trainer, checkpoints
        self._text, self._tokenizer, self._on_end = text, tokenizer, on_end
        # Adapters in the engine by the name of their checkpoint, the least recently used first.
        self._loaded: collections.OrderedDict[str, Mapping[str, Adapters]] = (
            collections.OrderedDict()
        )
        # Requests that use them.
        self._using: collections.Counter[str] = collections.Counter()
        # Guards both. Nothing waits for the engine under it, whose threads take it too.
        self._freed = threading.Condition()
        # Held while an adapter is loaded or makes room.
        self._loading = threading.Lock()
        self._make_room()

    def _make_room(self) -> None:
        """Gives the engine room for all adapters at once: each other count is another program."""
        nothing = self._trainer.programs.nothing
        for number in range(self._trainer.config.adapters + 1):
            self._models.load_adapter(_SLOT, number, nothing, self._base)
        for number in range(self._trainer.config.adapters):
            self._models.promote(_SLOT, self._trainer.config.adapters)
            self._models.retire(_SLOT, number)

    def sample(self, asked: Asked, checkpoint: Checkpoint | None) -> None:
        """Begins to carry a request out. May wait for room in the engine; raises nothing."""
        try:
            fields = json.loads(asked.body)
            request, prompt = read_sample(fields, asked.id, self._tokenizer.vocab_size)
            key, part, loaded = self._take(checkpoint)
        except Exception as error:
            self._on_end(asked, failed(_plain(error)), 0)
            return

        def give_back() -> None:
            self._models.give_back(loaded)
            with self._freed:
                self._using[key] -= 1
                self._freed.notify_all()

        scores: Future | None = None

        def end(found: list[tuple[list[int], list[float]] | None]) -> None:
            give_back()
            whole = [each for each in found if each is not None]
            if len(whole) < len(found):  # the server ends; the next one samples it again
                self._on_end(asked, None, 0)
                return
            sequences = [self._cut(request, *each) for each in whole]
            count = len(prompt) + sum(len(tokens) for _, tokens, _ in sequences)
            if scores is None:
                self._on_end(asked, Result("", write_samples(sequences, None), True), count)
                return

            def scored(future: Future) -> None:
                error = future.exception()
                if error is not None:
                    self._on_end(asked, failed(_plain(error)), count)
                    return
                logprobs = np.concatenate([[np.nan], future.result()])
                last = fields.get("prompt_logprobs_last_n")
                logprobs[: len(prompt) - last if last else 0] = np.nan
                self._on_end(asked, Result("", write_samples(sequences, logprobs), True), count)

            scores.add_done_callback(scored)

        def refused(submitted: Future) -> None:
            error = submitted.exception()
            if error is not None:
                give_back()
                self._on_end(asked, failed(_plain(error)), 0)

        try:
            service = loaded.host.service
            if len(prompt) >= service.length:
                most = service.length - 1
                raise ValueError(f"the prompt has {len(prompt)} tokens; the longest has {most}")
            if fields.get("prompt_logprobs"):
                if len(prompt) < 2:
                    raise ValueError("prompt_logprobs needs a prompt of at least two tokens")
                scores = self._trainer.score(part, prompt)
            ways = make_ways(request, service.sampling, self._text, self._tokenizer.vocab_size)
            job = Sampling(request, prompt, loaded.adapter, asked.user, ways, end)
            service.submit(job).add_done_callback(refused)
        except Exception as error:
            give_back()
            self._on_end(asked, failed(_plain(error)), 0)

    def _cut(
        self, request: SampleRequest, tokens: list[int], logprobs: list[float]
    ) -> tuple[int, list[int], list[float]]:
        """A sample as the client gets it: it ends behind the first of the tokens that end it."""
        ends = {*self._text.stop_ids, *request.stop_tokens}
        count = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        tokens, logprobs = tokens[:count], logprobs[:count]
        stopped = tokens[-1] in ends or any(
            each in self._tokenizer.decode(tokens) for each in request.stop
        )
        return STOP if stopped else LENGTH, tokens, logprobs

    def _take(self, checkpoint: Checkpoint | None) -> tuple[str, Any, Loaded]:
        """(name, adapter, place in the engine) for a request, which gives it back."""
        if checkpoint is None:
            return "", None, self._models.take(self._base, "", "")[0]
        key = "tinker-" + hashlib.sha256(checkpoint.request.encode()).hexdigest()[:24]
        with self._loading:
            with self._freed:
                there = key in self._loaded
                full = not there and len(self._loaded) >= self._trainer.config.adapters
                oldest = self._oldest_idle() if full else None
            if oldest is not None:
                self._models.retire(oldest, 0)
            if not there:
                programs = self._trainer.programs
                data = self._checkpoints.read(checkpoint)
                state = adapters.load(programs.base, checkpoint.settings, data, checkpoint.steps)
                part = adapters.padded(state.part, programs.nothing)
                self._models.load_adapter(key, 0, part, self._base)
            with self._freed:
                if not there:
                    self._loaded[key] = part
                self._loaded.move_to_end(key)
                self._using[key] += 1
                return key, self._loaded[key], self._models.take(f"{key}@0", "", "")[0]

    def _oldest_idle(self) -> str:
        """Waits until an adapter is not used, and takes it out of the table."""
        while True:
            for name in self._loaded:
                if not self._using[name]:
                    del self._loaded[name]
                    return name
            self._freed.wait()


def read_sample(fields: Mapping[str, Any], id: str, vocab: int) -> tuple[SampleRequest, list[int]]:
    """(settings, prompt) of a request for samples. A seed that it leaves out is made of the id, so
    that a request which a crash cut off samples the same again. Raises ValueError.
    """
    for name, nothing in _REFUSED.items():
        if fields.get(name) not in (None, nothing):
            raise ValueError(f"{name}={fields[name]!r} is not served here")
    prompt: list[int] = []
    for index, chunk in enumerate(fields["prompt"]["chunks"]):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise ValueError(
                f"prompt.chunks[{index}] has the type {chunk['type']!r}; this model reads text"
            )
        prompt += chunk["tokens"]
    if not prompt or not all(type(token) is int and 0 <= token < vocab for token in prompt):
        raise ValueError(f"the prompt must hold tokens from 0 to {vocab - 1}, at least one")
    params = fields.get("sampling_params") or {}
    count = fields.get("num_samples", 1)
    _check(count, "num_samples", 1, MOST_SAMPLES)
    most = params.get("max_tokens")
    if most is not None:
        _check(most, "max_tokens", 1, 2**31 - 1)
    if params.get("top_k", -1) not in (-1, 0):
        raise ValueError(f"top_k={params['top_k']} is not served here; top_p and temperature are")
    for name, greatest in (("temperature", 100.0), ("top_p", 1.0)):
        value = params.get(name, 1.0)
        if type(value) not in (int, float) or not 0 <= value <= greatest:
            raise ValueError(f"{name}={value!r} must be from 0 to {greatest:g}")
    stop = params.get("stop")
    if stop is not None and not stop:
        raise ValueError("stop=[] is not served here: the model's own end always ends a sample")
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    texts = tuple(each for each in stops if isinstance(each, str))
    tokens = tuple(each for each in stops if type(each) is int)
    if len(texts) + len(tokens) < len(stops) or "" in texts:
        raise ValueError(f"stop={stop!r} must be texts that are not empty, or tokens")
    seed = params.get("seed")
    if seed is None:
        seed = int(hashlib.sha256(id.encode()).hexdigest()[:16], 16)
    request = SampleRequest(
        n=count,
        stop=texts,
        stop_tokens=tokens,
        max_tokens=most,
        seed=seed % 2**64,
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
    )
    return request, prompt


def _check(value: Any, name: str, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be from {least} to {most}")


def _plain(error: BaseException) -> Exception:
    """A refusal of the engine's as a ValueError."""
    if isinstance(error, ApiError) and error.status < 500:
        return ValueError(str(error))
    return error if isinstance(error, Exception) else RuntimeError(str(error))
