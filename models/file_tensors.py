"""Tensors that the files of a family name or group in another way than the model reads them.

``weights`` reads and writes tensors by the names of ``Parameter.huggingface``. Here these are made
of those in the files, and the other way round.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from models import families, mxfp4
from models.families.hybrid import Regrouped
from models.model_config import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


def own_name(config: ModelConfig, name: str) -> str | None:
    """The name of a file's tensor as others name it; None for one that is not read."""
    family = families.of_config(config)
    skipped = tuple(begin.format(layers=config.num_layers) for begin in family.skipped)
    if name.startswith(skipped):
        return None
    if family.guesses and (layer := _LAYER.match(name)) and int(layer[1]) >= config.num_layers:
        return None
    if family.prefix is not None and name.startswith(family.prefix):
        return "model." + name.removeprefix(family.prefix)
    return name


def file_names(config: ModelConfig, name: str) -> list[str]:
    """The names of the files' tensors that hold one of the model's."""
    found = _regrouped(config).get(name)
    if found is not None:
        return list(found.stored)
    return [next((file for file, own in _alternating(config).items() if name in own), name)]


def belongs_to_previous(config: ModelConfig, name: str) -> bool:
    """True if a tensor of the model stands in the same one of a file as the tensor before it."""
    return any(name in own[1:] for own in _alternating(config).values())


def file_tensors(config: ModelConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The files' tensors of some of the model's, by name.

    arrays: is emptied, so that no tensor is held twice for long. It must have those that stand in
    one tensor together.
    """
    owner = {name: file for file, own in _alternating(config).items() for name in own}
    out = {}
    for name in list(arrays):
        if name not in arrays:
            continue
        if name in owner:
            parts = [arrays.pop(each) for each in _alternating(config)[owner[name]]]
            out[owner[name]] = np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
            continue
        array = arrays.pop(name)
        found = _regrouped(config).get(name)
        if found is None:
            out[name] = array
        else:
            out |= dict(zip(found.stored, found.apart(config, array), strict=True))
    return out


def views(
    config: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that give the model's tensors that files have in another form, by name.

    shapes: of the files' tensors; those that are in another form give way to the model's. read: the
    whole of one of them, by its name.
    """
    found: dict[str, Callable[[], np.ndarray]] = {}
    read = functools.lru_cache(maxsize=4)(read)
    if families.of_config(config).alternating:
        found |= mxfp4.views(shapes, read)
        expand = functools.lru_cache(maxsize=1)(lambda name: found[name]())
    for name, own in _alternating(config).items():
        # others are named by the check that follows
        if name not in shapes or shapes[name][-1] % len(own):
            continue
        *rest, width = shapes.pop(name)
        for place, each in enumerate(own):
            shapes[each] = *rest, width // len(own)
            whole = functools.partial(expand if name in found else read, name)
            every = slice(place, None, len(own))
            found[each] = lambda whole=whole, every=every: whole()[..., every]
    for name, regrouped in _regrouped(config).items():
        there = [shapes.get(stored) for stored in regrouped.stored]
        width = next((shape[-1] for shape in there if shape), None)
        # others are named by the check that follows
        if width is None or there != list(regrouped.shapes(config, width).values()):
            continue
        rows = sum(shapes.pop(stored)[0] for stored in regrouped.stored)
        shapes[name] = rows, width
        found[name] = functools.partial(_together, regrouped, config, read)
    family = families.of_config(config)
    if family.experts is not None and family.experts.fused:
        for name in list(shapes):
            if parts := _EXPERTS.match(name):
                found |= _of_experts(*parts.groups(), name, shapes, read)
    return found


def _together(regrouped: Regrouped, config: ModelConfig, read) -> np.ndarray:
    return regrouped.together(config, [read(stored) for stored in regrouped.stored])


def _of_experts(folder: str, kind: str, name: str, shapes, read):
    """The tensors of single experts of one that holds those of all, [experts, outputs, inputs]."""
    count, rows, width = shapes.pop(name)
    parts = {"down_proj": slice(None)}
    if kind == "gate_up_proj":
        rows //= 2
        parts = {"gate_proj": slice(rows), "up_proj": slice(rows, None)}
    found = {}
    for expert in range(count):
        for part, at in parts.items():
            own = f"{folder}.{expert}.{part}.weight"
            shapes[own] = rows, width
            found[own] = lambda expert=expert, at=at: read(name)[expert, at]
    return found


@functools.lru_cache(maxsize=8)
def _alternating(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """By the name of a files' tensor, the model's whose last axes alternate in it."""
    found = families.of_config(config).alternating
    return {
        name.format(layer): tuple(each.format(layer) for each in own)
        for layer in range(config.num_layers)
        for name, own in found.items()
    }


@functools.lru_cache(maxsize=8)
def _regrouped(config: ModelConfig) -> dict[str, Regrouped]:
    """By the name of a tensor of a layer of the model, how files group it."""
    family = families.of_config(config)
    period = len(config.attention)
    states = [at for at in range(config.num_layers) if config.attention[at % period].mixes]
    return {
        each.name.format(layer): each.of_layer(layer)
        for each in family.regrouped
        for layer in states
    }
