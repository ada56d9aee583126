"""Times the grouped products of a mixture of experts, beside ``jax.lax.ragged_dot`` and beside one
product of all rows with one matrix, which bounds what a device can reach.

python -m launch.bench grouped --device=gpu [--pairs=65536 --experts=128 --matrix=2048,768]

They are first compared with a product in float32, values and gradients, at a small size; nothing is
timed if they are wrong. Rows are in bfloat16 (on CPU in float32). Groups are once all equal, and
once as uneven as experts without balance: the load of the n-th is in proportion to 1 / n.

TFLOP/s count 2 P D F for P rows and matrices of D x F, three times that with both gradients,
whatever a contender computes in vain.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags
from jax.errors import JaxRuntimeError

from benchmarks.results import define_counts, hardware, is_too_large, save
from pallas_kernels import choice
from pallas_kernels.grouped.api import grouped_product
from planner.timing import spread

flags.DEFINE_integer("pairs", 65536, "Pairs of a token and an expert, of grouped.", 8)
flags.DEFINE_integer("experts", 128, "Matrices, of grouped.", 1)
define_counts("matrix", ["2048", "768"], "Rows and columns of a matrix, of grouped.")

# Rows, groups, and rows and columns of a matrix at which results are compared.
_SMALL = (1000, 6, 256, 192)
# Largest error relative to the largest element.
BOUND = 1e-2


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to compute the products."""

    name: str
    # run(x [P, D], w [E, D, F], sizes [E]) -> [P, F]
    run: Callable[..., jax.Array]
    # Whether it has gradients.
    gradients: bool = True


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=150)
    if len(options.matrix) != 2:
        raise flags.IllegalFlagValueError(
            f"--matrix={','.join(options.matrix)} must be two numbers, as 2048,768"
        )
    dtype = jnp.float32 if options.device == "cpu" else jnp.bfloat16
    wrong = errors(dtype)
    console.print(", ".join(f"error of {name} {error:.1e}" for name, error in wrong.items()))
    if max(wrong.values()) > BOUND:
        sys.exit(f"wrong on this device, and not timed: an error is more than {BOUND}")
    shape = (options.pairs, options.experts, *map(int, options.matrix))
    rows: list[dict] = []
    name = str(jnp.dtype(dtype))
    report = dict(hardware=hardware(), dtype=name, shape=shape, errors=wrong, rows=rows)
    for load, sizes in loads(*shape[:2]).items():
        x, w, gradient = inputs(shape, dtype)
        for contender in contenders():
            for gradients in (False, True)[: 1 + contender.gradients]:
                run = _with_gradients(contender.run) if gradients else _forward(contender.run)
                given = (x, w, gradient, sizes)
                row = dict(contender=contender.name, load=load, gradients=gradients)
                try:
                    compiled = jax.jit(run).lower(*given).compile()
                    row |= spread(functools.partial(compiled, *given), options.repeats)
                    operations = 2 * shape[0] * shape[2] * shape[3] * (3 if gradients else 1)
                    row["tflops"] = operations / row["seconds"] / 1e12
                except JaxRuntimeError as error:
                    # as for the gradients of ragged_dot
                    if not is_too_large(error):
                        raise
                    row["error"] = str(error).split("\n")[0]
                rows.append(row)
                save(report)
    console.print(table(rows))


def contenders() -> Iterator[Contender]:
    """The ways that there are on this device."""
    yield Contender("ours", grouped_product)
    yield Contender("ragged_dot", jax.lax.ragged_dot)
    yield Contender("one matrix", lambda x, w, sizes: x @ w[0])
    if choice.here() == "hopper":
        yield Contender("jax's kernel", _jax_kernel, gradients=False)


def _jax_kernel(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """JAX's own for Hopper, which has no gradient that can be traced without a GPU."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # for GPUs only

    blocks = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=1)
    return ragged_dot(x, w, group_sizes=sizes, **blocks)


def loads(pairs: int, experts: int) -> dict[str, jax.Array]:
    """Sizes of the groups, int32 [E], that add up to ``pairs``."""
    found = {}
    for name, shares in {"even": np.ones(experts), "uneven": 1 / np.arange(1, experts + 1)}.items():
        ends = np.round(pairs * np.cumsum(shares) / np.sum(shares)).astype(np.int32)
        found[name] = jnp.asarray(np.diff(ends, prepend=0), jnp.int32)
    return found


def inputs(shape: tuple[int, ...], dtype) -> tuple[jax.Array, ...]:
    """(rows [P, D], matrices [E, D, F], the result's gradient [P, F])."""
    pairs, experts, size, columns = shape
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((pairs, size), (experts, size, columns), (pairs, columns))
    return tuple(jax.random.normal(*x, dtype) for x in zip(keys, shapes, strict=True))


def errors(dtype) -> dict[str, float]:
    """Largest errors of the result and of both gradients, relative to the largest element."""
    x, w, gradient = inputs(_SMALL, dtype)
    # an empty group, a border at no multiple of anything, and rows behind the last group
    sizes = jnp.array([0, 131, 1, 500, 0, 300], jnp.int32)
    real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    given = (jnp.where(real, x, 0), w, jnp.where(real, gradient, 0))
    found = jax.jit(_with_gradients(grouped_product))(*given, sizes)
    with jax.default_matmul_precision("highest"):
        wide = (y.astype(jnp.float32) for y in given)
        wanted = jax.jit(_with_gradients(jax.lax.ragged_dot))(*wide, sizes)
    names = ("the products", "the rows' gradients", "the matrices' gradients")
    return {
        name: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
        for name, a, b in zip(names, found, wanted, strict=True)
    }


def _forward(run: Callable) -> Callable:
    return lambda x, w, gradient, sizes: run(x, w, sizes)


def _with_gradients(run: Callable) -> Callable:
    def both(x, w, gradient, sizes):
        out, pull = jax.vjp(lambda x, w: run(x, w, sizes), x, w)
        return out, *pull(gradient)

    return both


def table(rows: list[dict]) -> rich.table.Table:
    """One line per contender, load and pass."""
    view = rich.table.Table(title="grouped products", title_justify="left")
    for name in ("load", "pass", "contender", "ms [range]", "TFLOP/s"):
        view.add_column(name, justify="right" if name in ("ms [range]", "TFLOP/s") else "left")
    for row in rows:
        way = "forward, backward" if row["gradients"] else "forward"
        if "error" in row:
            view.add_row(row["load"], way, row["contender"], row["error"], "-")
            continue
        middle, *ends = (f"{1e3 * row[key]:.4g}" for key in ("seconds", "fastest", "slowest"))
        took = f"{middle} [{', '.join(ends)}]"
        view.add_row(row["load"], way, row["contender"], took, f"{row['tflops']:.3g}")
    return view
