"""Fields of requests: read and checked one by one, with errors in the shape of the OpenAI API."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal

from models.marks import encodable, encodable_all

# Longest request, in bytes.
MOST_BYTES = 8 * 2**20
# The most answers to one request.
MOST_CHOICES = 16
# The deepest nesting of JSON that is read; messages need far less.
_DEEPEST = 32
# Characters of a value of the request's that an error repeats.
_WIDTH = 100
# Keys that say nothing that matters here. Every other key that is not read is refused, so that
# nobody believes it had an effect.
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "stream_options"})
# What may be asked for only as it is, by both kinds of requests: key -> the values that say so.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}


class ApiError(Exception):
    """An answer with an error: what goes wrong, in the shape of the API.

    retry_after_s: seconds after which the same request may succeed; None where it will not.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What requests of both kinds have."""

    # "chat", or "completion", which includes fill-in-the-middle.
    kind: ClassVar[Literal["chat", "completion"]]
    # "" for the only model there is.
    model: str = ""
    # How many answers there are to be.
    n: int = 1
    # Texts that end the message; they are not part of the answer.
    stop: tuple[str, ...] = ()
    # The most tokens of the message; None for as many as there is room for.
    max_tokens: int | None = None
    # None where the request leaves it to the server.
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Whether the answer has the log-probability of each token.
    logprobs: bool = False
    stream: bool = False
    # Whether a stream ends with a chunk that says what was used.
    include_usage: bool = False

    @property
    def held(self) -> bool:
        """Whether nothing of an answer can be shown before it is whole."""
        return False


def common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``Request`` but ``logprobs``. Raises ApiError."""
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise refuse("stream_options", "must be an object")
    most = typed(fields, "max_tokens", int, None)
    if most is not None and most < 1:
        raise refuse("max_tokens", f"{show(most)} must be an integer above 0")
    n = typed(fields, "n", int, 1)
    if not 1 <= n <= MOST_CHOICES:
        raise refuse("n", f"{show(n)} must be 1 to {MOST_CHOICES}")
    return dict(
        model=typed(fields, "model", str, ""),
        n=n,
        stop=_stop(fields.get("stop")),
        max_tokens=most,
        seed=typed(fields, "seed", int, None),
        temperature=_number(fields, "temperature"),
        top_p=_number(fields, "top_p"),
        stream=typed(fields, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
    )


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in the body of a POST. Raises ApiError."""
    if len(body) > MOST_BYTES:
        raise too_large()
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(f"the request must be an object, not {type(fields).__name__}")
    _check_depth(fields)
    return encodable_all(fields)


def too_large() -> ApiError:
    """The error for a request of more bytes than are read."""
    message = f"the request has more than {MOST_BYTES} bytes"
    return ApiError(message, status=413, code="request_too_large")


def unknown_model(asked: str, names: Iterable[str]) -> ApiError:
    """The error for a model that is not there. names: of those that are."""
    there = ", ".join(map(repr, names)) or "none"
    return ApiError(
        f"the model {show(asked)} does not exist; there is {there}",
        status=404,
        code="model_not_found",
        param="model",
    )


def check_keys(
    fields: Mapping[str, Any],
    read: type[Request],
    ignored: Collection[str],
    fixed: Mapping[str, tuple[Any, ...]],
) -> None:
    """Raises ApiError for a key that is not read, or may be asked for only as it is and is not.

    read: names the keys that are read. ignored, fixed: of this kind of requests alone.
    """
    for key, allowed in (_FIXED | dict(fixed)).items():
        if fields.get(key) not in allowed:
            why = f"{show(fields[key])} is not supported, only {allowed[-1]!r}"
            raise refuse(key, why, "unsupported_value")
    known = {field.name for field in dataclasses.fields(read)} - {"include_usage"}
    for key in fields.keys() - known - _IGNORED - {*ignored} - _FIXED.keys() - fixed.keys():
        raise refuse(key[:_WIDTH], "is not known here", "unknown_parameter")


def refuse(param: str, why: str, code: str = "invalid_value") -> ApiError:
    """The error for a field that is wrong."""
    return ApiError(f"{param}: {why}", code=code, param=param)


def show(value: Any) -> str:
    """A value of a request as an error repeats it, cut where it is long."""
    text = encodable(repr(value))
    return text if len(text) <= _WIDTH else text[:_WIDTH] + "…"


def typed(fields: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """A field of one type; the default where it is left out or null. Raises ApiError."""
    value = fields.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        name = "an integer" if kind is int else kind.__name__
        raise refuse(key, f"must be {name}, got {type(value).__name__}")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ApiError(f"the request is nested more than {_DEEPEST} deep", code="invalid_json")


def _number(fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise refuse(key, f"must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise refuse(key, f"{show(value)} is too large") from None


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(texts, list)
        or len(texts) > 4
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise refuse("stop", "must be a text, or up to 4 texts, none of them empty")
    return tuple(texts)
