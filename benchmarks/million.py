"""Times decoding after a million tokens of history, most of which is in host memory and on disk.

The device has a fixed budget. The model is small, has random weights, and uses NSA with the paper's
settings in every layer. The history consists of documents of random tokens. Each document is
encoded alone, because a prefill of the whole history would take hours: every token would read all
compressed keys before it.

The decoded tokens are random, too. Two tokens in a row therefore choose similar blocks only as far
as a random model makes them do so. The layers choose different blocks, so no block is sent ahead
unless --prefetch asks for it.

Blocks are really read from the disk: before decoding starts, the system's copy of the file in
memory is freed. A check decodes the same tokens with tiers and without, after a shorter history
that fits on the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table
from absl import flags
from flax import nnx

from attention.cache.documents import assemble, document_pages
from attention.cache.pages import PageAllocator
from attention.cache.storage import nbytes
from attention.methods.nsa import NSA
from benchmarks.results import hardware, save, scratch
from models.model_config import ModelConfig
from models.paged import document_encoder, forward, model_cache
from models.tiered import TieredModel
from models.transformer import Transformer

flags.DEFINE_integer(
    "tokens", 1_000_000, "Tokens of the history, a multiple of the block of 64.", lower_bound=64
)
flags.DEFINE_integer("document", 8_000, "Tokens of a document, likewise.", lower_bound=64)
flags.DEFINE_integer("device_mib", 64, "Budget of the cache on the device.")
flags.DEFINE_integer("host_mib", 128, "Budget of the blocks in host memory; the rest are on disk.")
flags.DEFINE_integer("decode", 256, "Tokens decoded and timed.", lower_bound=1)
flags.DEFINE_integer(
    "prefetch", 0, "Blocks on their way that a layer may not choose.", lower_bound=0
)
flags.DEFINE_integer("disk_workers", 4, "Threads that read from disk.", lower_bound=1)
flags.DEFINE_integer(
    "check_tokens", 8192, "Tokens of the history of the check, likewise.", lower_bound=256
)
flags.DEFINE_integer(
    "check_device_mib", 2, "Budget of its cache on the device; the host has half of its blocks."
)

CONFIG = ModelConfig(
    vocab_size=4096,
    embed_dim=128,
    mlp_dim=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    rope_theta=1e6,
    norm_eps=1e-5,
    tied_embeddings=True,
    qk_norm=True,
    attention=(NSA(),),
)
BLOCK = CONFIG.attention[0].block
MIB = 2**20
BLOCK_BYTES = 2 * BLOCK * CONFIG.num_kv_heads * CONFIG.head_dim * 4
# Tokens decoded before the timing starts. They complete a block, so that every program has run
# once.
WARM_UP = BLOCK + 1
# Tokens that the check decodes, and documents of its history.
CHECKED, CHECK_DOCUMENTS = 64, 4


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=110)
    for name, multiple in (
        ("tokens", BLOCK),
        ("document", BLOCK),
        ("check_tokens", BLOCK * CHECK_DOCUMENTS),
    ):
        if options[name].value % multiple:
            raise flags.IllegalFlagValueError(
                f"--{name}={options[name].value} must be a multiple of {multiple}"
            )
    with scratch("million_") as folder:
        report = measure(options, folder, console)
    console.print(table(report))
    save(report)


def measure(options, folder: Path, console: rich.console.Console) -> dict[str, dict]:
    """Fills a cache, decodes and checks; returns the numbers by group."""
    rng = np.random.default_rng(options.seed)
    history = rng.integers(0, CONFIG.vocab_size, options.tokens)
    decoded = rng.integers(0, CONFIG.vocab_size, WARM_UP + options.decode)
    model = jax.jit(lambda: Transformer(CONFIG, nnx.Rngs(options.seed)))()
    encode = document_encoder(model)
    pages = -(-(len(history) + len(decoded)) // BLOCK)
    memory = dict(python_and_jax=resident()[0])
    jax.block_until_ready(encode(history[: options.document].tolist()).layers)
    memory["before_the_cache"] = resident()[0]
    with _tiered(
        model, folder, pages, options.device_mib * MIB, options.host_mib * MIB, options
    ) as tiered:
        with _peak(memory, "most_while_filling"):
            filling = fill(tiered, encode, history, options.document, console)
        decode(tiered, decoded[:WARM_UP], len(history))
        before = tiered.cache.metrics()
        with _peak(memory, "most_while_decoding"), _compilations() as compilations:
            _, seconds = decode(tiered, decoded[WARM_UP:], len(history) + WARM_UP)
        after = tiered.cache.metrics()
    console.print("the check", style="dim")
    setting = dict(
        tokens=options.tokens,
        document=options.document,
        seed=options.seed,
        prefetch=options.prefetch,
    )
    return dict(
        run=dict(hardware=hardware(), **setting),
        bytes=dict(
            untiered=nbytes(jax.eval_shape(lambda: model_cache(CONFIG, pages))),
            history=options.tokens // BLOCK * BLOCK_BYTES * CONFIG.num_layers,
            device_budget=options.device_mib * MIB,
            device=after["tiers/device_bytes"],
            host_budget=options.host_mib * MIB,
            host=after["tiers/host_bytes"],
            disk=after["tiers/disk_blocks"] * BLOCK_BYTES,
        ),
        resident_mib=memory,
        filling=filling,
        decoding=per_token(seconds, before, after) | dict(compilations=len(compilations)),
        check=check(model, encode, folder / "check", options),
    )


def fill(
    tiered: TieredModel, encode: Callable, history: np.ndarray, size: int, console
) -> dict[str, float]:
    """Encodes the history and loads it into the cache, ``size`` tokens at a time.

    Returns the seconds of encoding, of loading, and of the flush to disk at the end.
    """
    seconds = dict(encode=0.0, load=0.0)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens encoded", total=len(history))
        for at in range(0, len(history), size):
            start = time.perf_counter()
            document = encode(history[at : at + size].tolist())
            jax.block_until_ready(document.layers)
            encoded = time.perf_counter()
            tiered.cache.load(0, document)
            seconds["encode"] += encoded - start
            seconds["load"] += time.perf_counter() - encoded
            progress.advance(task, document.length)
    start = time.perf_counter()
    tiered.cache.flush()
    return seconds | dict(flush=time.perf_counter() - start)


def decode(tiered: TieredModel, tokens: np.ndarray, place: int) -> tuple[np.ndarray, list[float]]:
    """Decodes given tokens one by one: (their hidden states, the seconds of each).

    place: of the first token.
    """
    outs = []
    seconds = []
    for number, token in enumerate(tokens):
        start = time.perf_counter()
        hidden = tiered.forward(
            np.array([[token]], np.int32), np.array([[place + number]], np.int32)
        )
        outs.append(np.asarray(hidden)[0, 0])
        seconds.append(time.perf_counter() - start)
    return np.stack(outs), seconds


def per_token(
    seconds: list[float], before: dict[str, int], after: dict[str, int]
) -> dict[str, float]:
    """Speed, moved bytes and needed blocks of a decoded token.

    seconds: of each token. before, after: the cache's metrics before and after these tokens.
    """
    gained = {name.removeprefix("tiers/"): after[name] - before[name] for name in after}
    tenth, median, most = np.quantile(seconds, (0.1, 0.5, 0.9))
    kinds = ("present", "prefetched", "missing")
    blocks = sum(gained[name] for name in kinds)
    moved = ("to_device_bytes", "from_disk_bytes", "to_host_bytes")
    return dict(
        tokens_per_s=1 / median,
        slow_tokens_per_s=1 / most,
        fast_tokens_per_s=1 / tenth,
        **{name: gained[name] / len(seconds) for name in moved},
        blocks=blocks / len(seconds),
        **{name: gained[name] / blocks for name in kinds},
        sent_in_vain=gained["sent_in_vain"] / len(seconds),
    )


def check(model: Transformer, encode: Callable, folder: Path, options) -> dict[str, float]:
    """Decodes the same tokens after the same documents, with tiers and without.

    Returns how far the hidden states differ, and for how many tokens the most likely next token is
    the same.
    """
    rng = np.random.default_rng(options.seed + 1)
    history = rng.integers(
        0, CONFIG.vocab_size, (CHECK_DOCUMENTS, options.check_tokens // CHECK_DOCUMENTS)
    )
    tokens = rng.integers(0, CONFIG.vocab_size, CHECKED)
    encoded = [encode(document.tolist()) for document in history]
    tail = -(-CHECKED // BLOCK)
    pages = sum(document.num_pages for document in encoded) + tail
    host = pages * CONFIG.num_layers * BLOCK_BYTES // 2
    with _tiered(model, folder, pages, options.check_device_mib * MIB, host, options) as tiered:
        for document in encoded:
            tiered.cache.load(0, document)
        found, _ = decode(tiered, tokens, history.size)
        read = tiered.cache.metrics()["tiers/from_disk_bytes"]
    allocator = PageAllocator(pages, BLOCK)
    cache, assembly = assemble(
        model_cache(CONFIG, pages, rotated=False), allocator, encoded, tail_pages=tail
    )
    step = jax.jit(forward, donate_argnums=1)
    wanted = []
    for number, token in enumerate(tokens):
        view = document_pages([assembly], [number + 1], pages)
        places = jnp.array([[history.size + number]])
        hidden, cache = step(model, cache, jnp.array([[token]]), places, view)
        wanted.append(np.asarray(hidden)[0, 0])
    best, best_wanted = (
        np.argmax(model.logits(jnp.asarray(x)), axis=-1) for x in (found, np.stack(wanted))
    )
    return dict(
        tokens=history.size,
        decoded=CHECKED,
        difference=float(np.max(np.abs(found - wanted))),
        largest=float(np.max(np.abs(wanted))),
        same_best=int(np.sum(best == best_wanted)),
        from_disk_bytes=read,
    )


def table(report: dict[str, dict]) -> rich.table.Table:
    """The report as a table."""
    run, size, memory, filling = (
        report[name] for name in ("run", "bytes", "resident_mib", "filling")
    )
    decoding = report["decoding"]
    check = report["check"]
    view = rich.table.Table(
        title=f"{run['tokens']:,} tokens in documents of {run['document']:,}", show_header=False
    )
    rows = {
        "a cache without tiers would take": f"{size['untiered'] / MIB:,.0f} MiB",
        "blocks of the history": f"{size['history'] / MIB:,.0f} MiB",
        "device": f"{size['device'] / MIB:.1f} of {size['device_budget'] / MIB:,.0f} MiB",
        "host": f"{size['host'] / MIB:,.1f} of {size['host_budget'] / MIB:,.0f} MiB",
        "disk": f"{size['disk'] / MIB:,.0f} MiB",
        "process: Python, JAX and weights": f"{memory['python_and_jax']:,.0f} MiB resident",
        "process: before the cache, a document encoded": f"{memory['before_the_cache']:,.0f} MiB "
        "resident",
        "process: most while filling": f"{memory['most_while_filling']:,.0f} MiB resident",
        "process: most while decoding": f"{memory['most_while_decoding']:,.0f} MiB resident",
        "filling": ", ".join(f"{name} {value:,.1f} s" for name, value in filling.items()),
        "decoding": f"{decoding['tokens_per_s']:.1f} tokens/s, median; a tenth slower than "
        f"{decoding['slow_tokens_per_s']:.1f}, a tenth faster than "
        f"{decoding['fast_tokens_per_s']:.1f}",
        "programs compiled meanwhile": f"{decoding['compilations']}",
        "to the device, per token": f"{decoding['to_device_bytes'] / 1024:,.0f} KiB",
        "from disk, per token": f"{decoding['from_disk_bytes'] / 1024:,.0f} KiB",
        "blocks needed, per token": f"{decoding['blocks']:.1f}: {decoding['present']:.1%} present, "
        f"{decoding['prefetched']:.1%} on their way, {decoding['missing']:.1%} missing",
        "blocks sent in vain, per token": f"{decoding['sent_in_vain']:.1f}",
        f"check, {check['tokens']:,} tokens": f"largest difference {check['difference']:.1e} of "
        f"{check['largest']:.1f}, {check['same_best']} of {check['decoded']} best tokens agree",
    }
    for name, value in rows.items():
        view.add_row(name, value)
    return view


@contextlib.contextmanager
def _tiered(
    model, folder: Path, pages: int, device: int, host: int, options
) -> Generator[TieredModel]:
    sizes = dict(rows=1, pages=pages, chunk=1, device_bytes=device, host_bytes=host)
    try:
        tiered = TieredModel(
            model, folder, **sizes, prefetch=options.prefetch, workers=options.disk_workers
        )
    except ValueError as error:  # of a budget that is too small
        raise flags.IllegalFlagValueError(str(error)) from error
    needed = CONFIG.attention[0].picks * CONFIG.num_kv_heads
    try:
        if tiered.cache.slots < needed:
            raise flags.IllegalFlagValueError(
                f"{device} bytes on the device hold {tiered.cache.slots} blocks, a token needs "
                f"{needed}"
            )
        yield tiered
    finally:
        tiered.cache.close()


@contextlib.contextmanager
def _compilations() -> Generator[list[str]]:
    """A list that gets the name of every program compiled within the block."""
    found: list[str] = []

    def listen(event: str, seconds: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def resident() -> tuple[float, float]:
    """MiB of the process in memory: (now, the most since ``_peak`` began). On Linux only."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


@contextlib.contextmanager
def _peak(memory: dict[str, float], name: str) -> Generator[None]:
    """Stores in ``memory[name]`` the most MiB that the process had within the block."""
    # this resets the maximum that the kernel keeps
    Path("/proc/self/clear_refs").write_text("5")
    yield
    memory[name] = resident()[1]
