"""Weights from device to device between processes: how the two sides find each other.

The arrays go by ``jax.experimental.transfer``. Small files in ``<workdir>/weights/live`` say who
serves what:

    publisher_<p>.json   process p of the learner: its address, the version that it serves, and
                         which parts of the arrays it has
    request_<p>_<id>     of an actor to process p: the parts that it wants
    answer_<p>_<id>      the ticket with which they can be pulled, once; or why not

An actor asks every process of the learner for those of its parts that the actor's own devices need.
So both sides may consist of several processes and have any layout, and no computation spans both
sides. Arrays that are not pulled are let go after the learner's deadline. Something may go wrong:
nobody answers at an old address, the learner dies in the middle, or the bits are wrong. The actor
then says so in its log and takes the version from storage.

Only the newest version is served. It takes memory on the learner's devices for one more copy of the
model in the sampling dtype. Who only reaches the server's port gets nothing: a pull names a ticket
of 64 random bits, which stands in the folder alone. The connection is not encrypted, so use it
inside one cluster only.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import transfer

from rl_code.weights.layout import Box

LIVE = "live"  # the folder in that of the weights


def start_server(host: str) -> transfer.TransferServer:
    """A transfer server at a free port of this machine."""
    return transfer.start_transfer_server(jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"])


def new_ticket() -> int:
    """A number under which arrays can be pulled, and which nobody can guess."""
    return secrets.randbits(64)


def identity(offer: Mapping[str, Any]) -> tuple[int, int]:
    """Offer of a version by a learner: its session and the version's number."""
    return offer["session"], offer["version"]["number"]


def box_of(data: list[list[int]]) -> Box:
    """A box as it comes back from JSON."""
    return tuple((start, stop) for start, stop in data)


def offer_path(folder: Path, process: int) -> Path:
    """File in which a process of the learner says what it serves."""
    return folder / f"publisher_{process}.json"


def answer_path(request: Path) -> Path:
    """File into which the answer to a request is written."""
    return request.with_name(request.name.replace("request", "answer", 1))
