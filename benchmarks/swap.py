"""The cost of a swap of documents: the time to the first token when one of many documents has
changed, against prefill; and the swap alone in caches of several sizes.

The model is small, with random weights and dense attention. A row has 16 documents and a question
behind them, together --row tokens. Prefill computes the whole row, either as one sequence or
document by document (squid). A swap writes the new document onto the pages of the old one and
computes the question alone. The document comes from the store, from each of its tiers, or is
encoded first. All contenders take turns, each with fresh documents. The result after a swap is
compared with that of a prefill of the same documents.

A swap alone writes the pages of a small document into a cache. It should take as long in a large
cache as in a small one, because it leaves all other pages as they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags
from flax import nnx

from attention.cache.document_store import TIERS, Budgets, DocumentStore
from attention.cache.documents import assemble, document_pages, fingerprint_weights, swap
from attention.cache.pages import PageAllocator
from attention.cache.tables import sequence_pages
from benchmarks.results import hardware, save, scratch
from models.model_config import ModelConfig
from models.paged import document_encoder, forward, model_cache
from models.transformer import Transformer

flags.DEFINE_integer("row", 16384, "Tokens of the documents and the question together.")
flags.DEFINE_integer("documents", 16, "Documents, of equal length.", lower_bound=2)
flags.DEFINE_integer("question", 64, "Tokens behind the documents.", lower_bound=1)
flags.DEFINE_list("caches", "62,250,1000", "MiB of the caches in which a swap alone is timed.")

CONFIG = ModelConfig(
    vocab_size=4096,
    embed_dim=256,
    mlp_dim=768,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e6,
    norm_eps=1e-5,
    tied_embeddings=True,
)
PAGE = 16
# Pages of the document that is swapped alone: 0.09 MiB of keys and values in the model above.
SMALL = 2
SEQUENCE, SQUID, NEW = (
    "prefill as one sequence",
    "prefill, each document alone",
    "swap, document encoded first",
)
STORED = {tier: f"swap, document kept in the {tier} tier" for tier in TIERS}


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=110)
    if options.row < options.documents + options.question:
        raise flags.IllegalFlagValueError(
            f"--row={options.row} leaves no token for each of --documents={options.documents}"
        )
    try:
        caches = [float(size) for size in options.caches]
    except ValueError:
        raise flags.IllegalFlagValueError(
            f"--caches={','.join(options.caches)} must be numbers of MiB"
        ) from None
    with scratch("swap_") as folder:
        report = measure(options, folder, console)
    report["alone"] = [swap_alone(mib, options, console) for mib in caches]
    console.print(table(report))
    console.print(alone_table(report))
    save(report)


def measure(options, folder: Path, console: rich.console.Console) -> dict:
    """Times every contender, and compares the logits after a swap with those of a prefill."""
    rng = np.random.default_rng(options.seed)
    length = (options.row - options.question) // options.documents
    question = rng.integers(0, CONFIG.vocab_size, options.question).tolist()
    documents = [
        rng.integers(0, CONFIG.vocab_size, length).tolist() for _ in range(options.documents)
    ]
    slot = options.documents // 2
    model = jax.jit(lambda: Transformer(CONFIG, nnx.Rngs(options.seed)))()
    bench = Bench(model, folder, documents, question, slot)
    seconds: dict[str, list[float]] = {}
    differences = []
    for turn in range(options.repeats + 1):
        for name, run in bench.contenders.items():
            console.print(f"round {turn} of {options.repeats}: {name}", style="dim")
            documents[slot] = rng.integers(0, CONFIG.vocab_size, length).tolist()
            bench.prepare(name, documents[slot])
            start = time.perf_counter()
            logits = jax.block_until_ready(run(documents))
            took = time.perf_counter() - start
            if turn:  # programs are compiled in round 0
                seconds.setdefault(name, []).append(took)
            if name in (NEW, *STORED.values()):
                differences.append(float(jnp.max(jnp.abs(logits - bench.squid(documents)))))
    return dict(
        hardware=hardware(),
        row=options.row,
        documents=options.documents,
        question=options.question,
        contenders={
            name: dict(seconds=statistics.median(times), fastest=min(times), slowest=max(times))
            for name, times in seconds.items()
        },
        difference=max(differences),
        largest=float(jnp.max(jnp.abs(logits))),
    )


def swap_alone(mib: float, options, console: rich.console.Console) -> dict:
    """Seconds of a swap of ``SMALL`` pages in a cache of ``mib`` MiB, and nothing else."""
    console.print(f"a swap alone in a cache of {mib:g} MiB", style="dim")
    model = jax.jit(lambda: Transformer(CONFIG, nnx.Rngs(options.seed)))()
    encode = document_encoder(model, page=PAGE)
    rng = np.random.default_rng(options.seed)
    documents = [encode(rng.integers(0, CONFIG.vocab_size, SMALL * PAGE).tolist()) for _ in "ab"]
    pages = int(mib * 2**20 * SMALL / documents[0].nbytes)
    allocator = PageAllocator(pages, PAGE)
    cache = model_cache(CONFIG, pages, page=PAGE, rotated=False)
    cache, assembly = assemble(cache, allocator, documents)
    seconds = []
    for turn in range(options.repeats + 1):
        jax.block_until_ready(cache)
        start = time.perf_counter()
        cache, assembly = swap(cache, allocator, assembly, 0, documents[turn % 2])
        jax.block_until_ready(cache)
        if turn:  # the program is compiled in turn 0
            seconds.append(time.perf_counter() - start)
    return dict(
        cache_mib=mib,
        document_mib=documents[0].nbytes / 2**20,
        seconds=statistics.median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
    )


class Bench:
    """The contenders. Each is a function that computes the logits of the token after the question.

    For the swaps, a cache holds all documents from the start. The document in ``slot`` is swapped.
    """

    def __init__(
        self,
        model: Transformer,
        folder: Path,
        documents: Sequence[Sequence[int]],
        question: list[int],
        slot: int,
    ):
        self._model, self._question, self._slot = model, question, slot
        self._encode = document_encoder(model, page=PAGE)
        everything = sum(map(len, documents)) * 2**20
        weights = fingerprint_weights(model, repr(model.config))
        self._store = DocumentStore(
            folder, weights, Budgets(everything, everything, everything), self._encode
        )
        self._pages = sum(-(-len(document) // PAGE) for document in documents) + -(
            -len(question) // PAGE
        )
        self._next = jax.jit(self._logits, donate_argnums=1)
        self._cache, self._allocator, self._assembly = self._assembled(documents)
        self.contenders: dict[str, Callable[[list[list[int]]], jax.Array]] = {
            SEQUENCE: self._sequence,
            SQUID: self.squid,
            NEW: self._swap,
            **dict.fromkeys(STORED.values(), self._swap),
        }

    def prepare(self, contender: str, document: list[int]) -> None:
        """Puts the document into the tier of the store from which the contender takes it."""
        for tier, name in STORED.items():
            if name == contender:
                self._store.put(self._encode(document), tier)

    def _sequence(self, documents: list[list[int]]) -> jax.Array:
        tokens = [*(token for document in documents for token in document), *self._question]
        pages = -(-len(tokens) // PAGE)
        cache = model_cache(CONFIG, pages, page=PAGE)
        view = sequence_pages(jnp.arange(pages)[None], jnp.array([len(tokens)]), PAGE)
        return self._next(
            self._model, cache, jnp.array([tokens]), jnp.arange(len(tokens))[None], view
        )[0]

    def squid(self, documents: list[list[int]]) -> jax.Array:
        """Encodes every document by itself and computes the question."""
        cache, _, assembly = self._assembled(documents)
        return self._answer(cache, assembly)[0]

    def _swap(self, documents: list[list[int]]) -> jax.Array:
        document = self._store.get(documents[self._slot])
        self._cache, self._assembly = swap(
            self._cache, self._allocator, self._assembly, self._slot, document
        )
        logits, self._cache = self._answer(self._cache, self._assembly)
        return logits

    def _assembled(self, documents: Sequence[Sequence[int]]):
        allocator = PageAllocator(self._pages, PAGE)
        encoded = [self._encode(document) for document in documents]
        empty = model_cache(CONFIG, self._pages, page=PAGE, rotated=False)
        cache, assembly = assemble(
            empty, allocator, encoded, tail_pages=-(-len(self._question) // PAGE)
        )
        return cache, allocator, assembly

    def _answer(self, cache, assembly):
        view = document_pages([assembly], [len(self._question)], self._pages)
        places = assembly.tail_place + jnp.arange(len(self._question))
        return self._next(self._model, cache, jnp.array([self._question]), places[None], view)

    @staticmethod
    def _logits(model, cache, tokens, places, view):
        hidden, cache = forward(model, cache, tokens, places, view)
        return model.logits(hidden[:, -1]), cache


def table(report: dict) -> rich.table.Table:
    """The times as a table, one line for each contender, compared with both kinds of prefill."""
    contenders = report["contenders"]
    view = rich.table.Table(
        caption=f"Logits after a swap: at most {report['difference']:.1e} from prefill's, which "
        "reach "
        f"{report['largest']:.1f}.",
        caption_justify="left",
        title=f"{report['documents']} documents and a question of {report['question']}, "
        f"{report['row']:,} tokens",
    )
    view.add_column("to the first token after one document changed")
    for name in ("seconds [range]", "x one sequence", "x document by document"):
        view.add_column(name, justify="right")
    for name, row in contenders.items():
        ratios = (
            f"{contenders[other]['seconds'] / row['seconds']:.1f}" for other in (SEQUENCE, SQUID)
        )
        view.add_row(
            name, f"{row['seconds']:.3f} [{row['fastest']:.3f}, {row['slowest']:.3f}]", *ratios
        )
    return view


def alone_table(report: dict) -> rich.table.Table:
    """The times of a swap alone as a table, one line for each size of the cache."""
    rows = report["alone"]
    size = rows[0]["document_mib"] if rows else 0.0
    view = rich.table.Table(title=f"A swap of a document of {size:.2f} MiB, nothing else")
    for name in ("cache [MiB]", "ms [range]"):
        view.add_column(name, justify="right")
    for row in rows:
        times = (f"{1e3 * row[name]:.2f}" for name in ("seconds", "fastest", "slowest"))
        view.add_row(f"{row['cache_mib']:,g}", "{} [{}, {}]".format(*times))
    return view
