"""Ids of answers that only the server can make, and users' keys that do not tell who they are.

Both are HMACs (RFC 2104) with one secret of the server. An id carries the version of the weights,
a counter and a tag of the user it was issued to, in the clear, and a code over all three. So an
event can be refused at once when its id was made up, or was issued to somebody else, even while the
answer itself is not recorded yet.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from rl_code.host.files import write_once

# Bytes below which a secret can be guessed.
_SHORTEST_SECRET = 16
_SECRET_BYTES = 32
# Hex digits of the user's tag (64 bits) and of the code (128 bits) in an id.
_TAG_DIGITS = 16
_CODE_DIGITS = 32
_ID = re.compile(
    rf"answer-([0-9]{{1,20}})-([0-9]{{1,40}})-([0-9a-f]{{{_TAG_DIGITS}}})-([0-9a-f]{{{_CODE_DIGITS}}})",
    re.ASCII,
)


class AnswerIds:
    """Makes and checks the ids of one server's answers."""

    def __init__(self, secret: bytes):
        """secret: at least 16 bytes that nobody else knows; other secrets make other ids."""
        self._tags = _derived(secret, "tag of a user")
        self._codes = _derived(secret, "id of an answer")

    def make(self, user: str, version: int, counter: int) -> str:
        """An id such as ``answer-12-7-3f…-9a…``.

        user: ``user_key`` of the person. version: of the weights, at least 0. counter: at least 0,
        never twice the same with one secret.
        """
        if version < 0 or counter < 0:
            raise ValueError(f"{version=} and {counter=} must be at least 0")
        return self._signed(f"answer-{version}-{counter}-{self._tag(user)}")

    def check(self, id: str) -> bool:
        """True if the id was made with this secret."""
        if not _ID.fullmatch(id):
            return False
        return hmac.compare_digest(id, self._signed(id.rpartition("-")[0]))

    def issued_to(self, id: str, user: str) -> bool:
        """True if the id was made with this secret, for this user."""
        return self.check(id) and hmac.compare_digest(id.split("-")[3], self._tag(user))

    def _tag(self, user: str) -> str:
        return _hmac(self._tags, user)[:_TAG_DIGITS]

    def _signed(self, text: str) -> str:
        return f"{text}-{_hmac(self._codes, text)[:_CODE_DIGITS]}"


def user_key(secret: bytes, api_key: str) -> str:
    """The user as records name them: a keyed hash of the API key, 32 hex digits. Without the secret
    it can be neither turned back nor compared with a guess.
    """
    return _hmac(_derived(secret, "key of a user"), api_key)[:32]


def origin_key(secret: bytes, organisation: str) -> str:
    """The organisation that keys were issued to as records name it, in the same way as
    ``user_key``.
    """
    return _hmac(_derived(secret, "key of an origin"), organisation)[:32]


def load_secret(path: str | os.PathLike) -> bytes:
    """The server's secret, which is made at the first call and then stays.

    The file holds hex digits and is readable by its owner alone. Of several processes that start at
    once, one makes it and all read it. Raises ValueError for a file that holds no such secret.
    """
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        made = secrets.token_hex(_SECRET_BYTES) + "\n"
        write_once(path, made.encode(), aside, private=True)
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError as error:
        raise ValueError(f"{path}: not a secret in hex digits") from error
    _check(secret)
    return secret


def _check(secret: bytes) -> None:
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(
            f"the secret has {len(secret)} bytes; it must have at least {_SHORTEST_SECRET}"
        )


@functools.lru_cache(maxsize=32)
def _derived(secret: bytes, purpose: str) -> bytes:
    """A secret for one purpose, so that what is known of one tells nothing of the others."""
    _check(secret)
    return hmac.digest(secret, purpose.encode(), hashlib.sha256)


def _hmac(secret: bytes, text: str) -> str:
    # a lone surrogate, which JSON can carry, must not end the request
    return hmac.digest(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hex()
