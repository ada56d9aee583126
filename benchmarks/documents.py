"""A server that reads each file once, beside one that keeps the beginnings of conversations.

An agent reads one file of this repository a turn and gets a short answer: --session_turns turns
over --session_files files, some of them again after they have changed. Then a second session of
another user of the same organisation reads the files in another order, and a third one does so at a
server that has started again, which has the keys of files on its disk alone. Every turn is one
request with the whole conversation.

Arms: "prefix", a model without documents, whose server finds the longest beginning of a
conversation that it has read; and "documents", a model with documents, whose server finds each file
too. Every fifth turn is asked again when all has been forgotten ("nothing kept"), and must get the
same answer: the same tokens with the same log-probabilities. Answers of the two masks differ.

Weights are random. CPU seconds are of the whole process, since the machine may be shared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
import statistics
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import model as bench_model
from benchmarks.results import hardware, save, scratch
from models.model_config import ModelConfig
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from people.feedback.records import AnswerRecord
from people.serving.fleet import Fleet
from people.serving.service import Service
from people.serving.warm_up import warm_up
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.answers import Answer, Pending
from rl_code.harness.endpoint.fields import ApiError, Request
from rl_code.harness.endpoint.requests import read_request
from rl_code.rollout.disk_pages import DiskPages
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler

flags.DEFINE_integer("session_turns", 20, "Turns of a session, of documents.", lower_bound=1)
flags.DEFINE_integer("session_files", 12, "Files of the repository, of documents.", lower_bound=1)
flags.DEFINE_integer("file_tokens", 256, "Tokens of a file at most, of documents.", lower_bound=32)
flags.DEFINE_integer("answer_tokens", 16, "Tokens of an answer, of documents.", lower_bound=1)

_SOURCES = Path(__file__).resolve().parents[1] / "rl_code" / "rollout"
_SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PAGE = 16
# Tokens of a turn beside its file and its answer, at most.
_AROUND = 64
_FLAGS = ("session_turns", "session_files", "file_tokens", "answer_tokens")
_ORGANISATION = "one"
_DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model, its engine, and what is read."""

    tokenizer: Tokenizer
    files: list[str]
    engine: Engine
    model: Transformer
    documents: DocumentsConfig | None


@dataclasses.dataclass
class Turn:
    """One request, and what it took."""

    record: AnswerRecord
    first_s: float
    first_cpu_s: float
    whole_s: float
    cpu_s: float
    prefilled: int


class Waiting:
    """A request in this process: notes when its first token comes, and waits for its end. It stands
    for ``answers.Pending``.
    """

    def __init__(self, request: Request):
        self.request = request
        self.first: tuple[float, float] | None = None
        self.answers: list[Answer] = []
        self.error: ApiError | None = None
        self._ended = threading.Event()

    def sampled(self, tokens: Sequence[int], index: int = 0) -> None:
        self.first = self.first or now()

    def answer(self, answer: Answer) -> None:
        self.sampled(answer.tokens)
        self.answers.append(answer)
        self._ended.set()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self._ended.set()

    def wait(self) -> Answer:
        self._ended.wait()
        if self.error is not None:
            raise self.error
        return self.answers[0]


def now() -> tuple[float, float]:
    """Seconds of the clock, and of all processors in this process."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=140)
    config = bench_model.model_config()
    arms: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("prefix", "documents"):
        with scratch("documents") as folder:
            found = sessions(setting(config, name == "documents"), folder)
        arms[name] = {part: summary(turns) for part, turns in found.items()}
        console.print(f"{name}: answers are equal with and without what was kept")
    console.print(table(arms))
    settings = {key: options[key].value for key in _FLAGS}
    save({"hardware": hardware(), "model": options.model, **settings, "arms": arms})


def setting(config: ModelConfig, with_documents: bool) -> Setting:
    """The same model for contexts with documents, or without."""
    options = flags.FLAGS
    texts = [path.read_text() for path in sorted(_SOURCES.glob("*.py"))]
    tokenizer = Tokenizer.train(texts, 1024, _SPECIAL, eos="<|im_end|>", pad="<|pad|>")
    cut = [tokenizer.decode(tokenizer.encode(text)[: options.file_tokens]) for text in texts]
    longest = -(-options.file_tokens // _PAGE) * _PAGE
    around = options.answer_tokens + _AROUND + (2 * _PAGE if with_documents else 0)
    length = -(-options.session_turns * (longest + around) // _PAGE) * _PAGE
    shapes = EngineConfig(
        slots=2,
        episodes=2,
        page=_PAGE,
        # two contexts, and all files in two versions
        pages=2 * (length // _PAGE) + 2 * options.session_files * longest // _PAGE + 8,
        prefill_rows=2,
        prefill_tokens=128,
        prompt_length=length,
        length=length,
        decode_steps=4,
        cache_dtype=config.dtype,
        view_block=128,
        longest_document=longest if with_documents else None,
    )
    config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size, param_dtype=config.dtype)
    mesh = bench_model.all_devices()
    stops = tuple(sorted(tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")))
    return Setting(
        tokenizer,
        cut[: options.session_files],
        Engine(config, shapes, SamplingConfig(), stops, mesh),
        bench_model.random_model(config, mesh, options.seed),
        DocumentsConfig(longest=longest, page=_PAGE) if with_documents else None,
    )


def sessions(made: Setting, folder: Path) -> dict[str, list[Turn]]:
    """The turns of three sessions, the third one at a server that has started again, and of those
    that were asked again when all was forgotten.
    """
    names = ("first session", "second, other order", "third, after a restart")
    found: dict[str, list[Turn]] = {name: [] for name in (*names, "nothing kept")}
    orders = orders_of(made.files)
    before, after = folder / "before", folder / "after"
    for numbers, disk in (((0, 1), before), ((2,), after)):
        with server(made, disk) as asked:
            whole = {}
            for number in numbers:
                found[names[number]], whole[number] = session(asked, number, orders[number])
            if disk == before:
                asked.disk.wait()
                shutil.copytree(before, after)
            for number, conversation in whole.items():
                for at in range(4, len(orders[number]), 5):
                    asked.forget(made)
                    again, _ = asked.ask(number, at, conversation[: 2 * at + 1])
                    found["nothing kept"].append(again)
                    check_equal(found[names[number]][at], again)
    return found


def session(
    asked: Asked, number: int, order: Sequence[tuple[str, str]]
) -> tuple[list[Turn], list[dict[str, Any]]]:
    """The turns of a session, and the whole conversation. order: the files that they read."""
    turns: list[Turn] = []
    conversation: list[dict[str, Any]] = []
    for at, (name, text) in enumerate(order):
        conversation.append(shown(name, text))
        turn, said = asked.ask(number, at, conversation)
        turns.append(turn)
        conversation.append({"role": "assistant", "content": said})
    return turns, conversation


@dataclasses.dataclass
class Asked:
    """A server in this process."""

    fleet: Fleet
    scheduler: Scheduler
    records: list[AnswerRecord]
    # The files of the keys of documents.
    disk: DiskPages
    folder: Path

    def ask(self, number: int, at: int, conversation: Sequence[dict[str, Any]]) -> tuple[Turn, str]:
        """A turn of a session, and the text of its answer, which is drawn by the same numbers each
        time that it is asked.
        """
        options = flags.FLAGS
        seed = options.seed + 1000 * number + at
        body = {"messages": conversation, "seed": seed, "max_tokens": options.answer_tokens}
        waiting = Waiting(read_request(json.dumps(body | {"model": "model"}).encode()))
        self.scheduler.take_stats()
        start = now()
        origin = self.fleet.origin_of(_ORGANISATION)
        user = self.fleet.user_of(f"user {number}")
        self.fleet.ask(user, "session", cast(Pending, waiting), origin=origin)
        said = waiting.wait().message.content
        end = now()
        assert waiting.first is not None
        first_s, first_cpu_s = (a - b for a, b in zip(waiting.first, start, strict=True))
        whole_s, cpu_s = (a - b for a, b in zip(end, start, strict=True))
        prefilled = self.scheduler.take_stats().prefilled_tokens
        return Turn(self.records[-1], first_s, first_cpu_s, whole_s, cpu_s, prefilled), said

    def forget(self, made: Setting) -> None:
        """Has the engine forget all keys, for which these are other weights, and the disk too."""
        self.fleet.models.services[0].load(jax.tree.map(lambda x: x, made.model)).result()
        self.disk.wait()
        for path in self.folder.glob("*/*"):
            path.unlink()


@contextlib.contextmanager
def server(made: Setting, folder: Path) -> Generator[Asked]:
    """A warm server. folder: for the keys of documents."""
    records: list[AnswerRecord] = []
    schedulers: list[Scheduler] = []
    protocol = PROTOCOLS["hermes"]
    disk = DiskPages(folder, 2.0**30, _DAY_S)

    def service(weights: Transformer, version: int) -> Service:
        schedulers.append(
            Scheduler(made.engine, made.tokenizer, workers=2, worker_deadline_s=600.0, disk=disk)
        )
        return Service(schedulers[-1], weights, version=version, protocol=protocol)

    fleet = Fleet(
        service,
        protocol=protocol,
        tokenizer=made.tokenizer,
        secret=bytes(32),
        on_answer=records.append,
        documents=made.documents,
    )
    with fleet:
        fleet.models.load("model", 0, made.model)
        warm_up(fleet.models.services[0])
        yield Asked(fleet, schedulers[0], records, disk, folder)


def orders_of(files: Sequence[str]) -> list[list[tuple[str, str]]]:
    """For each session the files that its turns read, as (name, text): all in turn, then again,
    when every third one has changed; later sessions read what has changed by then.
    """
    changed = [
        text.replace("\n", "  # changed\n", 1) if number % 3 == 0 else text
        for number, text in enumerate(files)
    ]
    turns = flags.FLAGS.session_turns
    rng = np.random.default_rng(flags.FLAGS.seed)
    pairs = [*enumerate(files), *itertools.islice(itertools.cycle(enumerate(changed)), turns)]
    orders = [pairs[:turns]]
    for _ in range(2):
        order = [*rng.permutation(len(files)), *rng.permutation(len(files))]
        orders.append([(int(at), changed[at]) for at in (order * turns)[:turns]])
    return [[(f"file_{at}.py", text) for at, text in order] for order in orders]


def shown(name: str, text: str) -> dict[str, Any]:
    """A message with a file."""
    parts = [("text", f"{name} is:\n"), ("document", text), ("text", "\nNow go on.")]
    return {"role": "user", "content": [{"type": kind, "text": part} for kind, part in parts]}


def check_equal(kept: Turn, forgotten: Turn) -> None:
    """Raises ValueError where an answer depends on what was kept."""
    one, other = kept.record, forgotten.record
    if (one.tokens, one.logprobs) != (other.tokens, other.logprobs):
        raise ValueError(f"{one.tokens} and {other.tokens} are answers to the same turn")


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """Means over a session."""
    sampled = sum(len(turn.record.tokens) for turn in turns)
    return {
        "first_token_s": round(statistics.median(turn.first_s for turn in turns), 4),
        "first_token_cpu_s": round(statistics.mean(turn.first_cpu_s for turn in turns), 4),
        "tokens_per_cpu_s": round(sampled / sum(turn.cpu_s for turn in turns), 2),
        "tokens_per_s": round(sampled / sum(turn.whole_s for turn in turns), 2),
        "prefilled": sum(turn.prefilled for turn in turns),
    }


def table(arms: dict[str, dict[str, dict[str, float]]]) -> rich.table.Table:
    """The sessions of all arms."""
    titles = ("arm", "session", "CPU s to first token", "s (median)")
    shown = rich.table.Table(*titles, "tokens per CPU s", "tokens per s", "prefilled tokens")
    for label, parts in arms.items():
        for part, found in parts.items():
            values = ("first_token_cpu_s", "first_token_s", "tokens_per_cpu_s", "tokens_per_s")
            shown.add_row(label, part, *(str(found[key]) for key in (*values, "prefilled")))
    return shown
