"""A finished group as bytes: who sampled it, when, with which weights, and all of it.

    magic "RLGROUP\\n", schema, size of the header, size of the group,
    CRC-32 of everything but itself
    header: {step, number, actor, incarnation, when}
    group: the Group, its Task included

Header and group are bytes of ``serialization.dumps``.

Until its step is consumed, a group stands in a file of the actor that sampled it (``group_logs``).
Groups of consumed steps are put together in shards (``shards``), from which the same bytes are read
again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib

import numpy as np

from rl_code.store import serialization
from rl_code.store.errors import StoreError
from rl_code.store.processes import ProcessId
from rl_code.types import Group

SCHEMA = 1
_MAGIC = b"RLGROUP\n"
_PREAMBLE = struct.Struct("<8sIIQ")
_CRC = struct.Struct("<I")
# Bytes before the header: the preamble and the checksum.
START = _PREAMBLE.size + _CRC.size


@dataclasses.dataclass(frozen=True)
class GroupRecord:
    """A group as it was delivered."""

    # the training step and the number of the item that it answers
    step: int
    number: int
    # the process that sampled it
    actor: ProcessId
    # seconds since 1970, by that host's clock
    when: float
    # versions of the weights that sampled its tokens, oldest first
    versions: tuple[int, ...]
    group: Group
    # hexadecimal SHA-256 of the group's bytes, without the header
    digest: str


def encode(step: int, number: int, actor: ProcessId, when: float, group: Group) -> bytes:
    """The file of a group. Raises TypeError for a value that cannot be serialised."""
    fields = {
        "step": step,
        "number": number,
        "actor": actor.name,
        "incarnation": actor.incarnation,
        "when": when,
    }
    header = serialization.dumps(fields)
    body = serialization.dumps(group)
    preamble = _PREAMBLE.pack(_MAGIC, SCHEMA, len(header), len(body))
    return b"".join([preamble, _CRC.pack(_checksum(preamble, header + body)), header, body])


def decode(data: bytes, name: object) -> GroupRecord:
    """The record in a file. Raises StoreError, saying ``name``, for a file that is damaged or of
    another schema.
    """
    header_bytes, group_bytes = check(data, name)
    try:
        header = serialization.loads(header_bytes)
        group = serialization.loads(group_bytes)
    except ValueError as error:
        raise StoreError(f"{name} cannot be read by this code: {error}") from error
    return GroupRecord(
        step=header["step"],
        number=header["number"],
        actor=ProcessId(header["actor"], header["incarnation"]),
        when=header["when"],
        versions=versions(group),
        group=group,
        digest=hashlib.sha256(group_bytes).hexdigest(),
    )


def check(data: bytes, name: object) -> tuple[bytes, bytes]:
    """Header and group of a file, not parsed. Raises as ``decode`` for what the checksum tells."""
    if len(data) < START or data[: len(_MAGIC)] != _MAGIC:
        raise _damaged(name, f"{len(data)} bytes that start with {data[: len(_MAGIC)]!r}")
    preamble = data[: _PREAMBLE.size]
    content = data[START:]
    _, schema, header_size, group_size = _PREAMBLE.unpack(preamble)
    if len(content) != header_size + group_size:
        raise _damaged(
            name, f"{len(content)} bytes of content instead of {header_size + group_size}"
        )
    if _CRC.unpack(data[_PREAMBLE.size : START]) != (_checksum(preamble, content),):
        raise _damaged(name, "it has changed since it was written")
    if schema != SCHEMA:
        raise StoreError(f"{name} has schema {schema}; this code reads schema {SCHEMA}")
    return content[:header_size], content[header_size:]


def address(data: bytes, name: object) -> tuple[int, int]:
    """Step and number of the item that a record answers; raises as ``decode``."""
    header = serialization.loads(check(data, name)[0])
    return header["step"], header["number"]


def size(data: bytes, begin: int) -> int:
    """Bytes of the record that begins there; 0 if no record begins there, or not all of
    it is there.
    """
    if data[begin : begin + len(_MAGIC)] != _MAGIC or len(data) < begin + START:
        return 0
    _, _, header_size, group_size = _PREAMBLE.unpack_from(data, begin)
    whole = START + header_size + group_size
    return whole if begin + whole <= len(data) else 0


def versions(group: Group) -> tuple[int, ...]:
    """The versions of the weights that sampled the group's tokens, oldest first; () when nothing
    was sampled.
    """
    sampled = [np.unique(trajectory.versions[trajectory.sampled]) for trajectory in group.all]
    return tuple(np.unique(np.concatenate(sampled)).tolist()) if sampled else ()


def _damaged(name: object, how: str) -> StoreError:
    return StoreError(
        f"{name} is damaged: {how}. Restore it; or, if its step is not consumed, delete the claims "
        "on its item to have it sampled again"
    )


def _checksum(preamble: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(preamble))
