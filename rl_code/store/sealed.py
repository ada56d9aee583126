"""Small files of the store: one line, a checksum and JSON, so that damage in them is noticed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from rl_code.store.errors import StoreError


def seal(content: Any) -> bytes:
    """A line of JSON behind its checksum."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def unseal(data: bytes, path: Path) -> Any:
    """The content of what ``seal`` wrote. Raises StoreError, naming ``path``, when a byte of it has
    changed.
    """
    checksum = data[:8]
    text = data[9:-1]
    if data != b"%08x %s\n" % (zlib.crc32(text), text):
        raise StoreError(
            f"{path} is damaged: its checksum is {checksum!r}, its content has "
            f"{zlib.crc32(text):08x}"
        )
    return json.loads(text)
