"""Prompts that another process prefills: how an actor and the process of the role prefill find each
other, and what they say.

The file ``<workdir>/prefill/offer.json`` has the address of the prefill process, the key of its
streams, and what its pages are like. An actor opens a stream to it and sends, in JSON:

    {"id", "version", "tokens", "kinds", "within_s"}    the tokens of a prompt, to be prefilled with
                                                        this version of the weights
    {"id", "uuid", "cuts"}                              the answer: the number under which the pages
                                                        can be pulled, once
    {"id", "refused"}                                   or why not

The arrays go by ``jax.experimental.transfer``, from device to device, as weights do
(``rl_code.weights.transfer_files``). A request is one message on an open stream, so shared storage
is asked once and not for every prompt. Streams are authenticated by the key, which those can read
who can read the workdir; arrays are neither encrypted nor authenticated. Use it inside one cluster.

Pages travel in blocks of a power of two of pages, so that few programs read and write them and no
page is sent that holds nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from models.sharding import MeshConfig
from rl_code.rollout.engine import Engine
from rl_code.weights.versions import in_words

_FOLDER = "prefill"  # in the workdir


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """A process of the role prefill, which prefills the prompts of all actors."""

    # Its devices. ``tensor`` must be that of ``rollout.mesh``, so that keys have the same bits.
    mesh: MeshConfig = MeshConfig()
    # Seconds that an actor waits for the pages of a prompt; then it prefills the prompt by itself.
    deadline_s: float = 20.0
    # Seconds for which an actor prefills by itself after it could not reach the prefill process, or
    # waited for it in vain; then it asks again.
    pause_s: float = 30.0

    def __post_init__(self):
        for name in ("deadline_s", "pause_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("fsdp", "context"):
            if getattr(self.mesh, name) not in (None, 1):
                raise ValueError(
                    f"mesh.{name}={getattr(self.mesh, name)} must be 1: the prefill process has "
                    "whole weights and whole rows; set mesh.data for as many rows"
                )


def offer_path(workdir: Path) -> Path:
    """File in which the prefill process says how it is reached."""
    return workdir / _FOLDER / "offer.json"


def kind_of(engine: Engine) -> dict[str, Any]:
    """Facts that must be the same on both sides for pages to have the same shapes and bits."""
    device = engine.mesh.devices.flat[0]
    config = engine.config
    leaves = jax.tree.leaves(engine.cache_shape().layers)
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "tensor": engine.mesh.shape["tensor"],
        "page": config.page,
        "prefill": [config.prefill_rows, config.prefill_tokens],
        "answer": [config.result_rows, config.result_tokens],
        "arrays": [in_words(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)) for x in leaves],
    }


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Difference of two kinds, in words; "" if nothing does."""
    names = [name for name in here if here[name] != there.get(name)]
    return "; ".join(f"{name} is {there.get(name)} there and {here[name]} here" for name in names)


def block_sizes(pages: int) -> list[int]:
    """The sizes of the blocks in which so many pages travel: powers of two, the largest first."""
    return [1 << bit for bit in reversed(range(pages.bit_length())) if pages >> bit & 1]


def send(end: Connection, message: Mapping[str, Any]) -> None:
    """Sends a message. Raises OSError when the other process has gone."""
    end.send_bytes(json.dumps(message).encode())


def receive(end: Connection) -> dict[str, Any]:
    """Waits for a message. Raises EOFError or OSError when the other process has gone, ValueError
    for what is no message.
    """
    return json.loads(end.recv_bytes())
