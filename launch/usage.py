"""The text of ``--help``: the purpose of a command, its flags, and the keys of its config."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table
from absl import flags

from rl_code.config import read_config
from rl_code.config.named import Named

_FIELD = re.compile(r"    (\w+): ")


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a config."""

    # Dotted, as on the command line behind --config.
    name: str
    kind: str
    # What it is where a config does not set it.
    value: str
    # What it means: the comment above the field.
    words: str


def keys(kind: type, path: str = "") -> Iterator[Key]:
    """The keys of a config that fills the dataclass ``kind``, sections first to last."""
    hints = typing.get_type_hints(kind)
    words = comments(kind)
    for field in dataclasses.fields(kind):
        if "follows" in field.metadata:
            continue
        name = f"{path}{field.name}"
        hint = hints[field.name]
        section = _section(hint)
        if section is None:
            kind_words = read_config.describe(hint)
            yield Key(name, kind_words, standard(field, name), words.get(field.name, ""))
            continue
        if type(None) in typing.get_args(hint) or typing.get_origin(hint) is tuple:
            yield Key(name, "section or None", standard(field, name), words.get(field.name, ""))
        inside = f"{name}[0]." if typing.get_origin(hint) is tuple else f"{name}."
        yield from keys(section, inside)


def _section(hint: Any) -> type | None:
    """The dataclass that a section becomes, also where a name may stand in its place."""
    members = [hint, *typing.get_args(hint)]
    written_out = [m for m in members if dataclasses.is_dataclass(m) and m is not Named]
    return read_config.section_of(hint) or (written_out[0] if written_out else None)


def standard(field: dataclasses.Field, name: str) -> str:
    """The value of a key that a config does not set, in words."""
    from rl_code.run import derive  # and with it jax, which most commands never need for their help

    why = derive.WHY.get(re.sub(r"\[\d+\]", "", name))
    if why:
        return f"from {why}"
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "must be set"
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return _text(value)


def comments(kind: type) -> dict[str, str]:
    """Field -> the comment lines above it."""
    found = {}
    lines: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if line.startswith("    # "):
            lines.append(line.strip("# "))
            continue
        if (field := _FIELD.match(line)) and lines:
            found[field[1]] = " ".join(lines)
        lines = []
    return found


def show(console: rich.console.Console, kind: type | None, *, config: bool = True) -> None:
    """Prints the help of the command that runs.

    kind: the dataclass that its config fills, if its keys can be set. config: whether it takes one.
    """
    main = sys.modules["__main__"]
    console.print(rich.markup.escape((main.__doc__ or "").strip()), highlight=False)
    table = rich.table.Table("flag", "default", "meaning", box=rich.box.SIMPLE)
    for name, flag in _flags(config):
        table.add_row(f"--{name}", _text(flag.default), rich.markup.escape(flag.help or ""))
    if table.rows:
        console.print(table)
    if kind is None:
        return
    console.print(
        "Keys of a config. Each can be set as --config.<key>=<value>, whether the config's file "
        "names it or not; a section that may be None is switched off by --config.<section>=None.",
    )
    table = rich.table.Table(box=rich.box.SIMPLE)
    for heading, width in (("key", 36), ("is", 22), ("unless set", 22), ("meaning", None)):
        table.add_column(heading, max_width=width, overflow="fold")
    for key in keys(kind):
        table.add_row(*(rich.markup.escape(text) for text in dataclasses.astuple(key)))
    console.print(table)


def _flags(config: bool) -> Iterator[tuple[str, flags.Flag]]:
    """The flags that this repository defines, --config and --workdir first.

    config: whether to name those that commands with a config share.
    """
    ours = {
        flag.name: flag
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if module.split(".")[0] in ("launch", "benchmarks", "experiments") or module == sys.argv[0]
        for flag in defined
        if config or module != "launch.flags"
    }
    first = [name for name in ("config", "workdir") if name in ours]
    for name in [*first, *sorted(ours.keys() - set(first))]:
        yield name, ours[name]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(one) for one in value)})"
    if hasattr(value, "name") and hasattr(value, "settings"):  # a named.Named
        return value.name
    return str(value)
