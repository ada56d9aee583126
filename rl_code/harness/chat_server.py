"""A model that somebody else serves, asked over the OpenAI chat API."""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from models.marks import encodable_all

# Answers that may be better when they are asked for again.
_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
# The longest body of an answer, and the piece that is read at once.
_LONGEST_BYTES, _PIECE_BYTES = 64 << 20, 1 << 16


class EndpointError(RuntimeError):
    """The server cannot be reached, or refuses what it is asked."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Address at which a model is served."""

    # Base URL, with /v1 where the server has it.
    url: str
    # The model's name there.
    model: str
    # The API key; "" for none.
    key: str = dataclasses.field(default="", repr=False)
    # Seconds in which one answer has to come.
    timeout_s: float = 600.0
    # How often a request is made that fails in a way that may pass, and seconds before the second.
    attempts: int = 5
    pause_s: float = 1.0

    def ask(self, body: Mapping[str, Any], within_s: float = math.inf) -> dict[str, Any] | None:
        """The body of the answer; None where the conversation is too long for the model.

        within_s: seconds of all attempts together. Raises EndpointError.
        """
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions",
            json.dumps({"model": self.model, **body}).encode(),
            {"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self.key}"} if self.key else {}),
        )
        deadline = time.monotonic() + within_s
        why = "no time is left"
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(max(0, min(self._pause(attempt), deadline - time.monotonic())))
            left_s = min(self.timeout_s, deadline - time.monotonic())
            if left_s <= 0:
                break
            try:
                return encodable_all(json.loads(_fetch(request, left_s)))
            except urllib.error.HTTPError as error:
                message, code = _error_of(error)
                if code == "context_length_exceeded":
                    return None
                why = f"{error.code}: {message}"
                if error.code not in _AGAIN:
                    break
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                why = f"{type(error).__name__}: {error}"
        raise EndpointError(f"{self.url} does not answer for the model {self.model!r}: {why}")

    def _pause(self, attempt: int) -> float:
        """Seconds before a further attempt."""
        return self.pause_s * 2 ** (attempt - 1)


def _fetch(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The body of an answer. Raises TimeoutError where it is not whole after so many seconds,
    however slowly it drips, and ValueError for one that is too long.
    """
    deadline = time.monotonic() + timeout_s
    parts: list[bytes] = []
    size = 0
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        while piece := answer.read1(_PIECE_BYTES):
            parts.append(piece)
            size += len(piece)
            if size > _LONGEST_BYTES:
                raise ValueError(f"the answer has more than {_LONGEST_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the answer is not whole after {timeout_s:g} s")
    return b"".join(parts)


def _error_of(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Message and code of an error's body."""
    text = error.read(_PIECE_BYTES).decode("utf-8", "replace")
    try:
        body = json.loads(text)["error"]
        return str(body["message"]), str(body.get("code"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return text[:500], ""
