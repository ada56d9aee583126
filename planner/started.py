"""Launches of the programs of a run on a GPU and what they move, from the programs compiled for it.

Of a decode program one step of its loop over tokens counts, of the others the whole. Rows are half
full: of the arrays of pages half is read. The compiler counts no operations of our kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import rich.markup
import rich.table
from jax.experimental import topologies

from models.model_config import ModelConfig
from models.sharding import make_mesh
from planner.flops import matmul_flops
from planner.hlo import Instruction, arrays
from planner.launches import Launch, launches, results
from planner.targets import TARGETS, Target
from rl_code.run.config import RunConfig
from rl_code.run.traced import traced_programs

PROGRAMS = ("decode", "prefill", "update")
# A launch that moves less takes about as long as it takes to start it.
SMALL = 1e6
# What a device's kernel takes at least, by measurements of decoding on an H200: 2.7 ms for 661.
LAUNCH_S = 4e-6


@dataclasses.dataclass(frozen=True)
class Source:
    """Launches of one kind that come from one operation of JAX."""

    # The end of its path.
    name: str
    kind: str
    again: bool
    launches: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A program on a target."""

    program: str
    target: str
    layers: int
    # Of one step of a decode program, else of the program.
    launches: float
    # Those of them that move less than SMALL bytes.
    small: float
    # Copies and casts, and their bytes.
    copies: float
    copied: float
    # Those in a loop that read nothing that it changes, as copies of weights in each decode step.
    again: float
    again_bytes: float
    read: float
    written: float
    # Operations of the products that are not in kernels of ours.
    flops: float
    # Bytes of a device for temporaries, of the program.
    temporary: float
    # By the bytes, the most first.
    sources: tuple[Source, ...]

    @property
    def milliseconds(self) -> dict[str, float]:
        """The least time of each: memory and products at peak rates, launches at LAUNCH_S."""
        target = TARGETS[self.target]
        return {
            "memory": 1e3 * (self.read + self.written) / target.bandwidth,
            "products": 1e3 * self.flops / target.flops,
            "launches": 1e3 * self.launches * LAUNCH_S,
        }


def rows(
    target: Target, config: RunConfig, model: ModelConfig, programs: Sequence[str] = PROGRAMS
) -> Iterable[Row]:
    """A row for each program of a run, compiled for a target that need not be here.

    The process must have the target's environment from its start on. config: with its derived
    sizes, and with the mesh. model: its dtype is that of computation; samplers hold their weights
    in it.
    """
    os.environ.update(target.environment)
    chips = topologies.get_topology_desc(**target.topology(config.mesh.devices)).devices
    mesh = make_mesh(config.mesh, list(chips))
    for program in programs:
        learns = program == "update"
        held = model if learns else dataclasses.replace(model, param_dtype=model.dtype, remat=False)
        traced = traced_programs(config, held, mesh, learns=learns, samples=not learns)[program]
        engine = config.rollout.engine
        trips = {"decode": engine.decode_steps, "update": config.train.micro_batches or 1}
        sizes = (model.num_layers, trips.get(program, 1), engine.pages)
        yield row(traced.lower().compile(), program, target, *sizes)


def row(
    compiled: Any, program: str, target: Target, layers: int, loop: int, pages: int | None
) -> Row:
    """The launches of a compiled program.

    program: of PROGRAMS. loop: trips of its outermost loop whose count depends on data: tokens of
    a dispatch, or micro-batches. pages: of the cache.
    """
    text = compiled.as_text()
    trips: list[float] = [loop, 1]
    steps = loop if program == "decode" else 1

    def of_kernel(line: Instruction, shapes: Sequence[str]) -> tuple[float, float]:
        read = sum(
            x.bytes / 2 if x.sizes[:1] == (pages,) else x.bytes
            for shape in shapes
            for x in arrays(shape)
        )
        return read, results(line)

    found = launches(text, trips, of_kernel)
    if program == "decode":  # what stands around its loop runs once a dispatch
        found = [dataclasses.replace(x, times=x.times / steps) for x in found if x.depth]
    copies = [x for x in found if x.kind == "copy"]
    again = [x for x in found if x.again]
    return Row(
        program=program,
        target=target.name,
        layers=layers,
        launches=_times(found),
        small=_times(x for x in found if x.read + x.written < SMALL),
        copies=_times(copies),
        copied=sum(x.bytes for x in copies),
        again=_times(again),
        again_bytes=sum(x.bytes for x in again),
        read=sum(x.times * x.read for x in found),
        written=sum(x.times * x.written for x in found),
        flops=matmul_flops(text, trips) / steps,
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        sources=_sources(found),
    )


def _times(found: Iterable[Launch]) -> float:
    return sum(x.times for x in found)


def _sources(found: Sequence[Launch]) -> tuple[Source, ...]:
    counts: dict[tuple[str, str, bool], float] = collections.defaultdict(float)
    sizes: dict[tuple[str, str, bool], float] = collections.defaultdict(float)
    for x in found:
        # what a loop unrolls has the same end of its path
        key = ("/".join(x.source.split("/")[-3:]) or x.name.rstrip(".0123456789"), x.kind, x.again)
        counts[key] += x.times
        sizes[key] += x.bytes
    most_first = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(Source(*key, counts[key], size) for key, size in most_first)


def table(found: Sequence[Row]) -> rich.table.Table:
    """One line per program and target."""
    view = rich.table.Table(title="launches of compiled programs", title_justify="left")
    columns = (
        "launches",
        "a layer",
        "below 1 MB",
        "copies (GB)",
        "again in a loop (GB)",
        "read GB",
    )
    for name in (
        "program",
        "target",
        *columns,
        "written GB",
        "TFLOP",
        "temporary GB",
        "ms at peak",
    ):
        view.add_column(name, justify="left" if name in ("program", "target") else "right")
    for x in found:
        view.add_row(
            x.program + (", a step" if x.program == "decode" else ""),
            x.target,
            f"{x.launches:,.0f}",
            f"{x.launches / x.layers:.1f}",
            f"{x.small:,.0f}",
            f"{x.copies:,.0f} ({x.copied / 1e9:,.2f})",
            f"{x.again:,.0f} ({x.again_bytes / 1e9:,.2f})",
            f"{x.read / 1e9:,.2f}",
            f"{x.written / 1e9:,.2f}",
            f"{x.flops / 1e12:,.2f}",
            f"{x.temporary / 1e9:,.2f}",
            "\n".join(f"{name} {time:,.2f}" for name, time in x.milliseconds.items()),
        )
    return view


def source_table(found: Row, most: int) -> rich.table.Table:
    """The operations of JAX whose launches move the most in a program."""
    title = f"{found.program} on {found.target}: what moves the most"
    view = rich.table.Table(title=title, title_justify="left")
    for name in ("operation", "kind", "launches", "MB"):
        view.add_column(name, justify="left" if name in ("operation", "kind") else "right")
    for x in found.sources[:most]:
        kind = x.kind + (", again" if x.again else "")
        view.add_row(
            rich.markup.escape(x.name), kind, f"{x.launches:,.0f}", f"{x.bytes / 1e6:,.1f}"
        )
    return view


def to_json(found: Row) -> dict[str, Any]:
    """A row as JSON's types."""
    return dataclasses.asdict(found) | {"milliseconds": found.milliseconds}


def from_json(found: dict[str, Any]) -> Row:
    """The row that ``to_json`` has written."""
    given = {name: x for name, x in found.items() if name not in ("milliseconds", "sources")}
    return Row(**given, sources=tuple(Source(**x) for x in found["sources"]))
