"""Requests of the OpenAI completions API, fill-in-the-middle included, and their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from models.tokenizer import Tokenizer
from rl_code.environment.documents import DocumentsConfig, place
from rl_code.harness.endpoint.fields import (
    ApiError,
    Request,
    check_keys,
    common,
    read_object,
    refuse,
    show,
    typed,
)

# What may be asked for only as it is.
_FIXED: Mapping[str, tuple[Any, ...]] = {"echo": (None, False)}
# The most likely tokens that may be asked for beside each sampled one.
_MOST_LOGPROBS = 5
# Texts of more tokens than this many times the longest context are refused before they are
# tokenised, judged by the bytes of the longest token.
_LONGEST_TOKEN = 256


@dataclasses.dataclass(frozen=True)
class FillInTheMiddle:
    """Format of the prompt for a model that fills a gap between two texts: ``prefix_text`` + before
    + ``suffix_text`` + behind + ``middle_text``, and then it samples.

    The three are what the model was trained with, usually special tokens. Special tokens inside of
    the two texts are plain text (``models.marks``), so that no file can end its own text.
    """

    prefix_text: str = "<|fim_prefix|>"
    suffix_text: str = "<|fim_suffix|>"
    middle_text: str = "<|fim_middle|>"

    def tokens(self, before: str, behind: str, tokenizer: Tokenizer) -> list[int]:
        """The tokens that a completion of the gap follows."""
        before, behind = map(tokenizer.marks.quote, (before, behind))
        texts = (self.prefix_text, before, self.suffix_text, behind, self.middle_text)
        return tokenizer.encode("".join(texts))


@dataclasses.dataclass(frozen=True)
class CompletionRequest(Request):
    """A request for what follows a text, or stands between two."""

    kind = "completion"
    # The text, or its tokens.
    prompt: str | tuple[int, ...]
    # The text behind the gap; None where there is no gap.
    suffix: str | None = None
    # Texts that stand before the prompt, each a document of its own: files that are open.
    documents: tuple[str, ...] = ()

    def behind_documents(
        self, tokens: list[int], tokenizer: Tokenizer, config: DocumentsConfig | None
    ) -> tuple[list[int], list[int] | None]:
        """The tokens of the prompt behind those of its documents, and what each place is.

        config: of the documents; None for a model without them. Raises ApiError for a model that
        knows none.
        """
        if config is None:
            if self.documents:
                why = "this model reads no documents beside a prompt"
                raise refuse("documents", why, "unsupported_value")
            return tokens, None
        quote = tokenizer.marks.quote
        texts = [(tokenizer.encode(quote(text)), True) for text in self.documents]
        return place([*texts, (tokens, False)], 0, 0, config, tokenizer.pad_id)

    def tokens(self, tokenizer: Tokenizer, gaps: FillInTheMiddle | None, longest: int) -> list[int]:
        """The tokens that the answer follows. Raises ApiError for what this model cannot read.

        gaps: how a gap is put; None for a model that fills none. longest: tokens of a context.
        """
        size = len(self.prompt) + len(self.suffix or "") + sum(map(len, self.documents))
        if size > longest * _LONGEST_TOKEN:
            raise ApiError(
                f"the prompt has {size} characters; a context has {longest} tokens",
                code="context_length_exceeded",
                param="prompt",
            )
        if self.suffix is not None and gaps is None:
            raise refuse("suffix", "this model fills no gaps", "unsupported_value")
        if isinstance(self.prompt, str):
            if self.suffix is None:
                tokens = tokenizer.encode(self.prompt)  # whose special tokens the client means
            else:
                tokens = gaps.tokens(self.prompt, self.suffix, tokenizer)
        else:
            tokens = list(self.prompt)
            if max(tokens) >= tokenizer.vocab_size:
                raise refuse("prompt", f"token {max(tokens)} must be below {tokenizer.vocab_size}")
        # the engine feeds the last token to the decoder, and needs one before it
        if len(tokens) < 2:
            raise refuse("prompt", f"has {len(tokens)} tokens; it must have at least 2")
        return tokens


def read_completion(body: bytes) -> CompletionRequest:
    """The request in the body of a POST. Raises ApiError."""
    fields = read_object(body)
    n = typed(fields, "n", int, 1)
    check_keys(fields, ("prompt", "suffix", "documents"), _FIXED | {"best_of": (None, n)})
    suffix = typed(fields, "suffix", str, None)
    prompt = _prompt(fields.get("prompt"))
    if suffix is not None and not isinstance(prompt, str):
        raise refuse("suffix", "needs a prompt that is a text")
    logprobs = typed(fields, "logprobs", int, None)
    if not 0 <= (logprobs or 0) <= _MOST_LOGPROBS:
        raise refuse("logprobs", f"{show(logprobs)} must be 0 to {_MOST_LOGPROBS}")
    return CompletionRequest(
        prompt=prompt,
        suffix=suffix,
        documents=_documents(fields.get("documents")),
        logprobs=logprobs is not None,
        alternatives=logprobs or 0,
        **common(fields),
    )


def _documents(value: Any) -> tuple[str, ...]:
    """The texts of files that are open."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise refuse("documents", f"{show(value)} must be a list of texts")
    return tuple(value)


def _prompt(value: Any) -> str | tuple[int, ...]:
    """A text, or tokens; one of either may come in a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(type(each) is int for each in value):
        if min(value) < 0:
            raise refuse("prompt", f"token {min(value)} must be at least 0")
        return tuple(value)
    raise refuse("prompt", "must be a text, or a list of tokens, one prompt to a request")
