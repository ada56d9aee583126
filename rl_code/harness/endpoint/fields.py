"""Fields of requests: read and checked one by one, with errors in the shape of the OpenAI API."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal

from models.marks import encodable, encodable_all
from rl_code.environment.tools.schema import is_deeper, load_json

# Longest request, in bytes.
MOST_BYTES = 8 * 2**20
# The most answers to one request.
MOST_CHOICES = 16
# The deepest nesting of JSON that is read; messages need far less.
_DEEPEST = 32
# Characters of a value of the request's that an error repeats.
_WIDTH = 100
# Keys that requests of both kinds have. Every key that is not read is refused, so that nobody
# believes it had an effect.
_KEYS = frozenset(
    "model n stop max_tokens seed temperature top_p logprobs stream stream_options logit_bias "
    "presence_penalty frequency_penalty user store metadata".split()
)
# Bounds of the API on biases, metadata, and the name of a client's own user.
_MOST_BIASES = 1024
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_LONGEST_USER = 512


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
    """The fields that requests of both kinds share."""

    # "chat", or "completion", which includes fill-in-the-middle.
    kind: ClassVar[Literal["chat", "completion"]]
    # The API that it was read from, and that its answer has the form of.
    form: ClassVar[Literal["chat", "responses", "messages"]] = "chat"
    # "" for the only model there is.
    model: str = ""
    # Number of answers.
    n: int = 1
    # Texts that end the message; they are not part of the answer.
    stop: tuple[str, ...] = ()
    # The most tokens of the message; None for as many as there is room for.
    max_tokens: int | None = None
    # None where the request leaves it to the server.
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # True if the answer has the log-probability of each token.
    logprobs: bool = False
    stream: bool = False
    # True if a stream ends with a chunk that holds the token counts.
    include_usage: bool = False
    # Number of the most likely tokens that are given with the log-probability of each token.
    alternatives: int = 0
    # (token, what is added to its logit).
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Subtracted from the logits of tokens that the answer has already: once, and for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # The JSON schema that the answer must have, as text; "" for an answer in any form.
    json_schema: str = ""
    # Kept in the record of the answer: the client's metadata, its name for its own user, and
    # False where it does not want the answer to be trained on.
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    end_user: str = ""
    store: bool | None = None
    # Hints in the request that change nothing here; the head of the response names them.
    unheeded: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """True if nothing of an answer can be shown before it is whole."""
        return False


def common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``Request`` but ``logprobs``. Raises ApiError."""
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
        temperature=_number(fields, "temperature", 0.0, 2.0),
        top_p=_number(fields, "top_p", 0.0, 1.0),
        stream=typed(fields, "stream", bool, False),
        include_usage=_include_usage(fields),
        logit_bias=_logit_bias(fields.get("logit_bias")),
        presence_penalty=_number(fields, "presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=_number(fields, "frequency_penalty", -2.0, 2.0) or 0.0,
        metadata=_metadata(fields.get("metadata")),
        end_user=short_text(fields, "user", _LONGEST_USER),
        store=typed(fields, "store", bool, None),
    )


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in the body of a POST. Raises ApiError."""
    if len(body) > MOST_BYTES:
        raise too_large()
    try:
        fields = load_json(body.decode())
    except (ValueError, RecursionError, MemoryError) as error:
        raise ApiError(f"the request is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(f"the request must be an object, not {type(fields).__name__}")
    check_depth(fields)
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
    fields: Mapping[str, Any], read: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises ApiError for a key that is not read, or may be asked for only as it is and is not.

    read, fixed: of this kind of requests alone; keys that are read, and key -> the values that say
    how it is.
    """
    for key, allowed in fixed.items():
        if fields.get(key) not in allowed:
            why = f"{show(fields[key])} is not supported, only {allowed[-1]!r}"
            raise refuse(key, why, "unsupported_value")
    for key in sorted(fields.keys() - _KEYS - {*read} - fixed.keys()):
        if fields[key] is None:  # clients write so what they leave out
            continue
        raise refuse(key[:_WIDTH], "is not known here", "unknown_parameter")


def check_parts(value: Mapping[str, Any], known: Collection[str], param: str) -> None:
    """Raises ApiError for a key of a part of a request that is not read and says something."""
    for key in sorted(value.keys() - {*known}):
        if value[key] not in (None, [], {}, ""):
            raise refuse(f"{param}.{key[:_WIDTH]}", "is not known here", "unknown_parameter")


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


def short_text(fields: Mapping[str, Any], key: str, longest: int) -> str:
    """A text of at most so many characters; "" where it is left out. Raises ApiError."""
    text = typed(fields, key, str, "")
    if len(text) > longest:
        raise refuse(key, f"has {len(text)} characters; at most {longest} are read")
    return text


def one_of(fields: Mapping[str, Any], key: str, values: Collection[str]) -> str | None:
    """One of some texts; None where it is left out. Raises ApiError."""
    value = typed(fields, key, str, None)
    if value is not None and value not in values:
        raise refuse(key, f"{show(value)} must be one of {', '.join(values)}")
    return value


def check_depth(value: Any) -> None:
    """Raises ApiError for a value of JSON that is nested too deeply."""
    if is_deeper(value, _DEEPEST):
        raise ApiError(f"the request is nested more than {_DEEPEST} deep", code="invalid_json")


def _number(fields: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise refuse(key, f"must be a number, got {type(value).__name__}")
    if not low <= value <= high:  # of integers of any length, too
        raise refuse(key, f"{show(value)} must be {low:g} to {high:g}")
    return float(value)


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise refuse("stream_options", "must be an object")
    if not fields.get("stream"):
        raise refuse("stream_options", "only with stream=true")
    if options.get("include_obfuscation"):
        why = "is not supported, only False"
        raise refuse("stream_options.include_obfuscation", why, "unsupported_value")
    known = {"include_usage", "include_obfuscation"}
    check_parts(options, known, "stream_options")
    return typed(options, "include_usage", bool, False)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > _MOST_BIASES:
        raise refuse("logit_bias", f"must be an object of at most {_MOST_BIASES} tokens")
    biases = []
    for token, bias in value.items():
        # as ids are written, and no other digits than ASCII's
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise refuse("logit_bias", f"{show(token)} must be the number of a token")
        found = _number({"logit_bias": bias}, "logit_bias", -100.0, 100.0)
        if found is None:
            raise refuse("logit_bias", f"{show(token)} must have a number")
        biases.append((int(token), found))
    return tuple(biases)


def _metadata(value: Any) -> dict[str, str]:
    value = {} if value is None else value
    texts = [*value, *value.values()] if isinstance(value, dict) else [None]
    if not all(isinstance(text, str) for text in texts) or len(value) > _MOST_METADATA:
        raise refuse("metadata", f"must be an object of at most {_MOST_METADATA} texts")
    for key, text in value.items():
        if len(key) > _LONGEST_KEY or len(text) > _LONGEST_VALUE:
            why = f"{show(key)}: at most {_LONGEST_KEY} characters, its value {_LONGEST_VALUE}"
            raise refuse("metadata", why)
    return dict(value)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > 4
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise refuse("stop", "must be a text, or up to 4 texts, none of them empty")
    return tuple(texts)
