"""Output of ``python -m launch.train --dry_run``: the config and what a run would take."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import rich.box
import rich.console
import rich.markup
import rich.table

from rl_code.config import read_config
from rl_code.run import derive
from rl_code.run.config import RunConfig
from rl_code.run.dry_run import Plan, plan
from rl_code.run.run import Run

# Narrower than this, the table of the config has where values come from below them.
WIDE = 116


def show(console: rich.console.Console, config: RunConfig, written: Collection[str]) -> Plan:
    """Prints the config and the plan of its run; trains nothing and touches no workdir.

    written: dotted keys that the file or the command line set.
    """
    console.print(config_table(config, written, narrow=console.width < WIDE))
    with tempfile.TemporaryDirectory() as folder, Run(config, Path(folder)) as run:
        found = plan(run, lambda name: console.print(f"compiling {name} …", style="dim"))
    tables = (size_table, memory_table, attention_table, tools_table)
    for table in tables:
        console.print(table(found))
    return found


def config_table(
    config: RunConfig, written: Collection[str], narrow: bool = False
) -> rich.table.Table:
    """Every key with its value and where that comes from.

    narrow: put the last below the value, so that values have room on a narrow screen.
    """
    table = rich.table.Table(box=rich.box.SIMPLE, title="config", title_justify="left")
    table.add_column("key", no_wrap=True)
    table.add_column("value, and where it comes from" if narrow else "value", overflow="fold")
    if not narrow:
        table.add_column("from", overflow="fold", max_width=44)
    for key, value in flat(read_config.to_dict(config)):
        source = source_of(key, value, written)
        style = "bold" if source.startswith("derived") else "dim" if source == "default" else None
        cells = [rich.markup.escape(text(value)), source]
        table.add_row(key, *(["\n  ".join(cells)] if narrow else cells), style=style)
    return table


def source_of(key: str, value: Any, written: Collection[str]) -> str:
    """Origin of the value of a key, in words."""
    if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in written):
        return "set"
    if value is None:
        return "default"
    why = derive.WHY.get(key)
    if why is None and key.startswith("suites["):
        inside = key.split("].", 1)[-1]
        why = derive.WHY.get(f"suites.{inside.split('.')[0]}")
    return f"derived: {why}" if why else "default"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested sections; suites are numbered, names with settings are one."""
    if isinstance(value, dict) and value and set(value) != {"name", "settings"}:
        for key, inside in value.items():
            yield from flat(inside, f"{path}.{key}" if path else key)
    elif path == "suites":
        for at, suite in enumerate(value):
            yield from flat(suite, f"suites[{at}]")
    else:
        yield path, value


def text(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, dict) and set(value) == {"name", "settings"}:
        settings = ", ".join(f"{key}={text(one)}" for key, one in value["settings"].items())
        return f"{value['name']}({settings})" if settings else value["name"]
    if isinstance(value, dict):
        given = {key: one for key, one in value.items() if one not in (None, "")}
        return ", ".join(f"{key}={text(one)}" for key, one in given.items())
    if isinstance(value, list):
        return f"({', '.join(map(text, value))})"
    return repr(value) if isinstance(value, str) else str(value)


def size_table(found: Plan) -> rich.table.Table:
    """Counts, and how long the programs took to compile."""
    table = rich.table.Table(box=rich.box.SIMPLE, title="size", title_justify="left")
    table.add_column("what")
    table.add_column("how much", justify="right")
    devices = f"{found.learners}, which also sample" if found.shared else f"{found.learners}"
    table.add_row("parameters", f"{found.parameters:,}")
    table.add_row("devices that learn", devices)
    if not found.shared:
        table.add_row("devices that sample", f"{found.samplers}")
    if found.prefillers:
        table.add_row("devices that prefill for actors", f"{found.prefillers}")
    table.add_row("trajectories per step", f"{found.trajectories:,}")
    table.add_row("sampled tokens per step, at most", f"{found.sampled_tokens:,}")
    table.add_row("slots of a batch (empty rows cost nothing)", f"{found.batch_slots:,}")
    # a run on CPU takes about twice as long, once: it keeps what it compiled
    how = "(not optimised)" if jax.default_backend() == "cpu" else ""
    for program in found.programs:
        table.add_row(f"compiled {program.name} {how}", f"{program.seconds:.1f} s")
    return table


def memory_table(found: Plan) -> rich.table.Table:
    """Memory of one device, by part."""
    table = rich.table.Table(box=rich.box.SIMPLE, title="memory per device", title_justify="left")
    for column, justify in (("of the", "left"), ("part", "left"), ("MiB", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for part in found.memory:
        table.add_row(part.where, part.name, mib(part.bytes), part.note)
    table.add_section()
    for where in ("learner",) if found.shared else ("learner", "sampler"):
        note = "one program's working memory at a time" if found.shared else ""
        table.add_row(where, "together", mib(found.device_bytes(where)), note, style="bold")
    return table


def attention_table(found: Plan) -> rich.table.Table:
    """Implementation of each attention call and of the experts, and the reason where it is no
    kernel.
    """
    table = rich.table.Table(box=rich.box.SIMPLE, title="attention, experts", title_justify="left")
    for column in ("phase", "layers", "method", "call", "implementation", "why no kernel"):
        table.add_column(column)
    for call in found.attention:
        table.add_row(
            call.phase, str(call.layers), call.method, call.part, call.implementation, call.reason
        )
    return table


def tools_table(found: Plan) -> rich.table.Table:
    """Cost of declaring each tool."""
    table = rich.table.Table(box=rich.box.SIMPLE, title="tools", title_justify="left")
    table.add_column("tool")
    table.add_column("tokens of every prompt", justify="right")
    for name, tokens in found.tools.items():
        table.add_row(name, f"{tokens:,}")
    table.add_section()
    table.add_row("together", f"{sum(found.tools.values()):,}", style="bold")
    return table


def mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.1f}"
