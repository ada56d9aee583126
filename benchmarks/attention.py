"""Checks that the attention methods are right on a device, then compares them with
``jax.nn.dot_product_attention``, on GPU also with cuDNN: time, memory and FLOPs of the forward
pass, and of forward and backward pass together; and the time and bytes of decoding one token.

Nothing is timed if anything is wrong (``benchmarks.correctness``). --json takes all numbers, and
--table prints the tables of docs/benchmarks/attention.md from such a file without running anything.

For each length there is one sequence of random keys, in float32 on CPU and in bfloat16 elsewhere.
Heads are split over the devices. NSA and MoBA have the settings of their papers, and the window has
512 keys. Methods with projections of their own have random ones (``benchmarks.mixing``), and no
check beside the tests. Squid has 16 documents and a tail of a sixteenth of the sequence.

Memory is that of the compiled program: its arguments, results and temporaries. FLOPs are those of
its matrix products, without those of kernels. They are compared with the fewest FLOPs that the
definition of the method needs. These count 2 for a multiply-add, and 2.5 times the forward pass for
the backward pass; TFLOP/s are these over the time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import rich.console
import rich.table
from absl import flags

from attention.layout import lay_out
from attention.methods.dense import Dense
from attention.methods.method import LayerShape, Method
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.squid import Squid
from attention.methods.window import Window
from benchmarks import correctness, decode, mixing
from benchmarks.results import define_counts, hardware, is_too_large, save
from models.sharding import MeshConfig, make_mesh, per_shard
from pallas_kernels.tokens import TAIL, Tokens, sequences
from planner.flops import attention_trips, matmul_flops
from planner.timing import spread

define_counts("lengths", ["2048", "4096", "8192", "16384", "32768"], "Tokens of the sequence.")
flags.DEFINE_integer("heads", 16, "Query heads.")
flags.DEFINE_integer("kv_heads", 2, "Key/value heads.")
flags.DEFINE_integer("head_dim", 64, "Size of a head.")
flags.DEFINE_list("contenders", [], "Which to run; all when empty.")
flags.DEFINE_integer(
    "check_length", 512, "Tokens of the rows that correctness is checked on, a multiple of 64.", 64
)
flags.DEFINE_integer("decode_rows", 8, "Rows that decode together.", 1)
flags.DEFINE_integer(
    "alike_keys",
    1,
    "So many consecutive queries are alike, and keys too, as in trained models: they differ by a "
    "tenth of their size.",
    1,
)
flags.DEFINE_string("table", None, "Print the tables of this file of results, and run nothing.")

DOCUMENTS = 16
PEER = "jax.nn"
CUDNN = "cudnn"
PEERS = (PEER, CUDNN)
OURS = ("dense", "window", "moba", "nsa", "squid", *mixing.METHODS)
# A program that needs more than this share of the free memory is not run. The allocator keeps freed
# memory, which may take as much again.
SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Contender:
    """One method of attention in the comparison."""

    name: str
    # run(q, k, v, ..., *given) -> out
    run: Callable
    arguments: tuple
    # Lower bound on the FLOPs of the forward pass, from the method's definition.
    least: float
    # How often a loop runs on average whose trip count depends on data.
    trips: float = 1.0
    # Further arguments, which have no gradients. As constants they would be folded, for seconds.
    given: tuple = ()


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=150)
    if options.table:
        print(markdown(json.loads(Path(options.table).read_text())))
        return
    if unknown := set(options.contenders) - {*PEERS, *OURS}:
        raise flags.IllegalFlagValueError(
            f"--contenders: no {', '.join(sorted(unknown))} is there, expected some of "
            f"{', '.join((*PEERS, *OURS))} ({CUDNN} on a GPU alone)"
        )
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    report = dict(
        hardware=hardware(),
        dtype=dtype,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        correctness=[],
        rows=[],
        decode=[],
    )
    _check(report, options, console)
    with jax.set_mesh(make_mesh(MeshConfig(1, 1), jax.devices()[:1])):
        for length in map(int, options.lengths):
            for row in time_decoding(length, options, report["dtype"], console):
                report["decode"].append(row)
                save(report)
    tensor = max(n for n in range(1, len(jax.devices()) + 1) if options.kv_heads % n == 0)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, tensor=tensor))):
        for length in map(int, options.lengths):
            for row in time_rows(length, options, tensor, console):
                report["rows"].append(row)
                # a program that takes all memory ends the process
                save(report)
    console.print(table(report["rows"]))
    console.print(decode.table(report["decode"]))


def _check(report: dict, options, console: rich.console.Console) -> None:
    """Checks every method and prints what was found; exits if anything is wrong."""
    if options.check_length % correctness.BLOCK:
        raise flags.IllegalFlagValueError(
            f"--check_length={options.check_length} must be a multiple of {correctness.BLOCK}"
        )
    # a kernel may be right for one size of a head and wrong for another
    head_dims = {options.head_dim} | (set() if options.device == "cpu" else {64, 128})
    found = []
    for head_dim in sorted(head_dims):
        sizes = correctness.Sizes(options.check_length, options.heads, options.kv_heads, head_dim)
        for one in correctness.check_all(report["dtype"], sizes):
            found.append(dataclasses.replace(one, check=f"{one.check}, heads of {head_dim}"))
            console.print(f"checked {found[-1].check}, {one.of}", style="dim")
            report["correctness"].append(dataclasses.asdict(found[-1]))
            # a kernel that takes the device with it ends the process
            save(report)
    console.print(correctness.table(found))
    if wrong := [f"{one.check} ({one.of})" for one in found if not one.right]:
        sys.exit(f"wrong on this device, and not timed: {', '.join(wrong)}")


def time_rows(length: int, options, tensor: int, console: rich.console.Console) -> Iterator[dict]:
    """Whole rows of one length, forward and with gradients. tensor: devices that heads are split
    over.
    """
    for contender in contenders(length, options):
        if options.contenders and contender.name not in options.contenders:
            continue
        console.print(f"{length} tokens: {contender.name}", style="dim")
        for gradients in (False, True):
            try:
                row = measure(contender, length, gradients, options.repeats, tensor)
            except (RuntimeError, ValueError) as error:
                # that a peer does not run here is a result, and that memory is too small for ours
                if contender.name not in PEERS and not is_too_large(error):
                    raise
                row = dict(_about(contender, length, gradients), error=str(error).split("\n")[0])
            yield row


def time_decoding(
    length: int, options, dtype: str, console: rich.console.Console
) -> Iterator[dict]:
    """One token against pages, for the methods that have any."""
    shape = LayerShape(options.head_dim, options.heads, options.kv_heads, options.head_dim)
    methods = {"dense": Dense(), "window": Window(512), "moba": MoBA(), "nsa": NSA()}
    for name, method in methods.items():
        if options.contenders and name not in options.contenders:
            continue
        console.print(f"{length} tokens: decoding, {name}", style="dim")
        sizes = (length, options.decode_rows, shape, dtype, options.repeats)
        yield decode.measure(name, method, *sizes)
    for name, method in mixing.METHODS.items():
        if options.contenders and name not in options.contenders:
            continue
        console.print(f"{length} tokens: decoding, {name}", style="dim")
        sizes = (length, options.decode_rows, _hidden(shape), dtype, options.repeats)
        yield mixing.measure_decoding(name, method, *sizes)


def contenders(length: int, options) -> Iterator[Contender]:
    """The methods and the peer on one sequence of ``length`` tokens."""
    n = options.heads
    kv = options.kv_heads
    h = options.head_dim
    keys = jax.random.split(jax.random.key(length), 10)
    dtype = jnp.float32 if options.device == "cpu" else jnp.bfloat16
    q, k = (
        alike(key, (1, length, heads, h), options.alike_keys, dtype)
        for key, heads in zip(keys[:2], (n, kv), strict=True)
    )
    v = jax.random.normal(keys[2], (1, length, kv, h), dtype)
    per_pair = 4.0 * n * h
    slots = np.arange(length)
    dense = per_pair * length * (length + 1) / 2
    heads = ("batch", None, "heads", None)
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    yield Contender(PEER, per_shard(peer, (heads,) * 3, heads), (q, k, v), dense)
    if options.device == "gpu":
        cudnn = functools.partial(peer, implementation="cudnn")
        yield Contender(CUDNN, per_shard(cudnn, (heads,) * 3, heads), (q, k, v), dense)

    def ours(
        name: str, method: Method, tokens: Tokens, least: float, extra: tuple = ()
    ) -> Contender:
        """extra: of NSA, its compressed and window keys and values, and its gates."""
        layout = lay_out((method,), tokens, align=0)
        return Contender(
            name,
            _sharded(method),
            (q, k, v, *extra),
            least,
            attention_trips((method,), tokens),
            (layout,),
        )

    single = sequences(jnp.array([length]), length)
    yield ours("dense", Dense(), single, dense)
    window = Window(512)
    yield ours("window", window, single, per_pair * np.minimum(slots + 1, window.window).sum())
    moba = MoBA()
    earlier = slots // moba.block
    pairs = slots % moba.block + 1 + np.minimum(earlier, moba.picks - 1) * moba.block
    yield ours("moba", moba, single, per_pair * pairs.sum() + per_pair / 2 * earlier.sum())
    nsa = NSA()
    stretches = np.maximum(slots - nsa.length + 1 + nsa.stride, 0) // nsa.stride
    chosen = np.minimum(slots // nsa.block, nsa.picks - 1) * nsa.block + slots % nsa.block + 1
    pairs = stretches + chosen + np.minimum(slots + 1, nsa.window)
    count = -(-length // nsa.block) * nsa.block // nsa.stride
    # a stretch has the mean of keys that are alike
    ck = alike(keys[3], (1, count, kv, h), -(-options.alike_keys // nsa.stride), dtype)
    cv = jax.random.normal(keys[4], (1, count, kv, h), dtype)
    wk, wv = (jax.random.normal(key, (1, length, kv, h), dtype) for key in keys[5:7])
    gates = jax.random.uniform(keys[7], (1, length, n, 3), dtype)
    yield ours("nsa", nsa, single, per_pair * pairs.sum(), (ck, cv, wk, wv, gates))
    tail = length // DOCUMENTS
    size = (length - tail) // DOCUMENTS
    documents = np.where(slots < size * DOCUMENTS, slots // size + 1, TAIL)
    tokens = dataclasses.replace(single, documents=jnp.asarray(documents, jnp.int32)[None])
    pairs = np.where(documents > 0, slots % size + 1, slots + 1)
    yield ours("squid", Squid(), tokens, per_pair * pairs.sum())
    shape = _hidden(LayerShape(h, n, kv, h))
    for name, method in mixing.METHODS.items():
        layout = lay_out((method,), single, align=0)
        parameters, inputs = mixing.drawn(method, shape, 1, length, dtype)
        run = mixing.runner(method, shape)
        bound = mixing.least_flops(method, shape, layout)
        trips = attention_trips((method,), single)
        yield Contender(name, run, (parameters, *inputs), bound, trips, (layout,))


def _hidden(shape: LayerShape) -> LayerShape:
    """A layer whose heads together are as wide as hidden states."""
    return dataclasses.replace(shape, embed_dim=shape.num_heads * shape.head_dim)


def alike(key: jax.Array, shape: tuple[int, ...], count: int, dtype) -> jax.Array:
    """Random vectors [1, T, heads, H]: each ``count`` that follow each other are one vector and a
    tenth of noise; with 1 all are independent.
    """
    own, shared = jax.random.split(key)
    noise = jax.random.normal(own, shape, dtype)
    if count == 1:
        return noise
    few = jax.random.normal(shared, (shape[0], -(-shape[1] // count), *shape[2:]), dtype)
    return jnp.repeat(few, count, axis=1)[:, : shape[1]] + 0.1 * noise


def _sharded(method: Method) -> Callable:
    heads = ("batch", None, "heads", None)
    rows = ("batch",)

    def run(q, k, v, *rest):
        *extra, layout = rest
        keys = {"main": (k, v)}
        if not extra:
            mapped = per_shard(
                lambda q, keys, layout: method.attend(q, keys, layout, None),
                (heads, heads, rows),
                heads,
            )
            return mapped(q, keys, layout)
        ck, cv, wk, wv, gates = extra
        keys |= {"compressed": (ck, cv), "window": (wk, wv)}
        return per_shard(method.attend, (heads, heads, rows, heads), heads)(q, keys, layout, gates)

    return run


def measure(contender: Contender, length: int, gradients: bool, repeats: int, devices: int) -> dict:
    """Seconds, bytes and FLOPs of the forward pass, or of it and the gradients of all arguments."""

    def both(along, *rest):
        count = len(contender.arguments)
        _, gradients = jax.vjp(lambda *x: contender.run(*x, *rest[count:]), *rest[:count])
        return gradients(along)

    row = _about(contender, length, gradients)
    given = (*contender.arguments, *contender.given)
    if gradients:
        # that of a sum, all ones, would be a constant that the compiler folds for seconds
        out = jax.eval_shape(contender.run, *given)
        given = (jax.random.normal(jax.random.key(0), out.shape, out.dtype), *given)
    compiled = jax.jit(both if gradients else contender.run).lower(*given).compile()
    memory = compiled.memory_analysis()
    row["bytes"] = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    )
    row["bytes"] *= devices
    row["flops"] = matmul_flops(compiled.as_text(), contender.trips) * devices
    free = psutil.virtual_memory().available
    if jax.default_backend() == "cpu" and row["bytes"] > SHARE * free:
        return row | dict(
            error=f"needs {row['bytes'] / 2**30:.0f} GiB and as much again, {free / 2**30:.0f} are "
            "free"
        )
    return row | spread(functools.partial(compiled, *given), repeats)


def _about(contender: Contender, length: int, gradients: bool) -> dict:
    """The texts of a row before anything ran."""
    return dict(
        contender=contender.name,
        tokens=length,
        gradients=gradients,
        least=contender.least * (1 + 2.5 * gradients),
    )


def table(rows: list[dict]) -> rich.table.Table:
    """One line per program, with its speed against the peer and against our dense attention at the
    same length: by CPU seconds on CPU, whose cores other processes may share.
    """
    view = rich.table.Table(title="whole rows", title_justify="left")
    for name in COLUMNS:
        view.add_column(name, justify="left" if name in ("contender", "pass") else "right")
    for cells in cells_of(rows):
        view.add_row(*cells)
    return view


COLUMNS = (
    "tokens",
    "contender",
    "pass",
    "seconds [range]",
    "CPU s",
    f"x {PEER}",
    "x dense",
    "memory MiB",
    "TFLOP/s",
    "GFLOP",
    "of least",
)


def cells_of(rows: list[dict]) -> Iterator[tuple[str, ...]]:
    """The cells of ``table``, line by line."""
    times = {(row["contender"], row["tokens"], row["gradients"]): decode.cost(row) for row in rows}
    for row in rows:
        ratios = []
        for other in (PEER, "dense"):
            reference = times.get((other, row["tokens"], row["gradients"]), math.nan)
            ratio = reference / decode.cost(row)
            ratios.append("-" if math.isnan(ratio) else f"{ratio:.2f}")
        took = (
            f"{row['seconds']:.4g} [{row['fastest']:.4g}, {row['slowest']:.4g}]"
            if "seconds" in row
            else row["error"]
        )
        # a kernel's products are not seen in the compiled program
        seen = row.get("flops", 0.0) >= row["least"]
        yield (
            str(row["tokens"]),
            row["contender"],
            "forward, backward" if row["gradients"] else "forward",
            took,
            f"{row['cpu_seconds']:.4g}" if "cpu_seconds" in row else "-",
            *ratios,
            f"{row['bytes'] / 2**20:,.0f}" if "bytes" in row else "-",
            f"{row['least'] / row['seconds'] / 1e12:.3g}" if "seconds" in row else "-",
            f"{row['flops'] / 1e9:,.1f}" if seen else "-",
            f"{row['flops'] / row['least']:.2f}" if seen else "-",
        )


def markdown(report: dict) -> str:
    """The tables of docs/benchmarks/attention.md, from what --json was given."""
    shape = "{heads} query and {kv_heads} key/value heads of {head_dim}, {dtype}".format(**report)
    worst = [row["error"] / row["bound"] for row in report["correctness"]]
    checked = f"{len(worst)} checks, the worst at {max(worst):.2f} of its bound" if worst else ""
    return "\n\n".join(
        [
            f"On {report['hardware']}; {shape}. Correctness: {checked or 'not checked'}.",
            _markdown(COLUMNS, cells_of(report["rows"])),
            _markdown(decode.COLUMNS, decode.cells_of(report["decode"])),
        ]
    )


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
