"""Tokenizers: byte-level BPE from a ``tokenizer.json``, from a GGUF file, or trained on the spot.

All are run by the ``tokenizers`` library. Text is tokenised as it stands: nothing adds a begin or
end token (templates write them as text), special tokens in the text become their single ids unless
they were quoted (``models.marks``), and decoding keeps them.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import gguf
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from models.gguf_file import open_gguf
from models.marks import Marks, covered, is_quoted, unquote
from models.own_template import TemplateSettings
from models.tokenizer_files import CONFIG_FILE, add_tokens, read_beside, write_beside

# How the tokenizer that is trained here cuts text before merging: a line break with the indent that
# follows it; one digit; a word; a run of punctuation; other white space. A space in front of a
# digit, word or punctuation joins it.
_PIECES = (
    r"\n[ \t]*",
    r" ?[0-9]",
    r" ?[\p{L}_]+",
    r" ?[^\s\p{L}0-9_]+",
    r"[^\S\n]+(?!\S)",
    r"[^\S\n]+",
)
# The same while training, with spaces cut from digits: no merge with a digit is learned, all ten
# are added afterwards.
_TRAINING_PIECES = (r" (?=[0-9])", *_PIECES)

# How Llama 3 and Qwen2 cut text, as in their tokenizer.json; they differ in how many digits join.
_LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PIECES = _LLAMA3_PIECES.replace(r"\p{N}{1,3}", r"\p{N}")

_SPACE = "Ġ"  # how byte-level BPE writes a space
# Added tokens that mark something even where the file does not call them special.
_VISIBLE_MARK = re.compile(r"[^\w\s]")
_CONTROL = gguf.TokenType.CONTROL
_USER_DEFINED = gguf.TokenType.USER_DEFINED


class Tokenizer:
    """Text to ids and back.

    ``eos`` ends an assistant turn, ``pad`` fills fixed shapes, ``bos`` may open a text; all are
    texts of tokens. chat_template: the jinja2 template that came with the tokenizer, if any;
    named_templates: others that came with it, by name.

    Safe to use from several threads at once. Raises ValueError when eos or pad is not a token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos: str,
        pad: str,
        bos: str | None = None,
        chat_template: str | None = None,
        named_templates: Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self.eos, self.pad, self.bos = eos, pad, bos
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        # What templates are rendered with.
        self.template_settings = TemplateSettings()
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_id, self.pad_id = self.token_id(eos), self.token_id(pad)
        # Ids and texts of the marks. Added tokens of letters or white space alone that are not
        # special belong to the words of the language: they mark nothing.
        self._mark_texts = {
            id: token.content
            for id, token in backend.get_added_tokens_decoder().items()
            if token.special or _VISIBLE_MARK.search(token.content)
        }
        self.marks = Marks(self._mark_texts.values())
        # Whether marks are looked for in normalised text, where another spelling may become one.
        self._respelled = backend.normalizer is not None and any(
            token.normalized and id in self._mark_texts
            for id, token in backend.get_added_tokens_decoder().items()
        )

    @classmethod
    def from_file(
        cls, path: str | Path, *, eos: str | None = None, pad: str | None = None
    ) -> Tokenizer:
        """Reads a ``tokenizer.json``, given by its path or its folder.

        eos and pad default to those of the ``tokenizer_config.json`` beside it, eos then to that of
        ``generation_config.json`` or ``config.json``; without a pad token eos pads. The chat
        template comes from the files beside it, too.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is not a tokenizer, or no eos is known.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        text = path.read_text(encoding="utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        if not isinstance(backend.model, models.BPE):
            kind = type(backend.model).__name__
            raise ValueError(f"{path} is a tokenizer of the kind {kind}; only BPE is supported")
        backend.no_truncation()
        backend.no_padding()
        beside = read_beside(path.parent)
        add_tokens(backend, beside)
        eos = eos or beside.token("eos_token")
        if eos is None and (end := beside.end_id()) is not None:
            eos = backend.id_to_token(end)
        if eos is None:
            raise ValueError(
                f"{path}: which token ends a turn? Pass eos=, or put eos_token into "
                f"{path.with_name(CONFIG_FILE)}"
            )
        templates = beside.templates()
        return cls(
            backend,
            eos=eos,
            pad=pad or beside.token("pad_token") or eos,
            bos=beside.token("bos_token"),
            chat_template=templates.pop("default", None),
            named_templates=templates,
        )

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """Rebuilds the tokenizer that a GGUF file describes in its metadata.

        Known are byte-level BPE with the pre-tokenizers of SmolLM (every digit alone, then GPT-2's
        pattern), Qwen2 and Llama 3. Raises ValueError for any other, naming it.
        """
        fields = open_gguf(path).fields

        def value(name):
            if f"tokenizer.ggml.{name}" not in fields:
                raise ValueError(f"{path} has no metadata tokenizer.ggml.{name}")
            return fields[f"tokenizer.ggml.{name}"].contents()

        def token_of(name) -> str | None:
            """The token whose id the file gives under ``name``, if it does."""
            return tokens[value(name)] if f"tokenizer.ggml.{name}" in fields else None

        model, pre = value("model"), value("pre")
        if model != "gpt2" or pre not in _PRE_TOKENIZERS:
            raise ValueError(
                f"{path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={pre!r} is not "
                f"supported, only 'gpt2' with {', '.join(map(repr, _PRE_TOKENIZERS))}"
            )
        tokens = value("tokens")
        kinds = value("token_type")
        merges = [tuple(merge.split(" ")) for merge in value("merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = _byte_level_bpe(
            vocab, merges, _PRE_TOKENIZERS[pre](), ignore_merges=pre == "llama-bpe"
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        named = {
            kind: [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
            for kind in set(kinds)
        }
        backend.add_special_tokens(
            [_added(token, special=True) for token in named.get(_CONTROL, [])]
        )
        backend.add_tokens([_added(token, special=False) for token in named.get(_USER_DEFINED, [])])
        eos = tokens[value("eos_token_id")]
        prefix = "tokenizer.chat_template"
        templates = {
            name.removeprefix(f"{prefix}."): field.contents()
            for name, field in fields.items()
            if name.startswith(f"{prefix}.")
        }
        template = fields.get(prefix)
        return cls(
            backend,
            eos=eos,
            pad=token_of("padding_token_id") or eos,
            bos=token_of("bos_token_id"),
            chat_template=template.contents() if template else templates.pop("default", None),
            named_templates=templates,
        )

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str],
        *,
        eos: str = "<|eot|>",
        pad: str = "<|pad|>",
    ) -> Tokenizer:
        """Learns byte-level BPE merges from ``texts``; the same texts always give the same
        tokenizer.

        Any text can be encoded and comes back unchanged. Special tokens have the first ids, in the
        order given, then the 256 bytes, the merges by frequency, and " 0" … " 9". Digits join with
        nothing but a space in front: " 3" is one token, "34" two. Texts with few repetitions give
        fewer than ``vocab_size`` tokens. Raises ValueError when vocab_size leaves no room for the
        tokens that are always there.
        """
        fixed = len(special_tokens) + 256 + len(string.digits)
        if vocab_size < fixed:
            raise ValueError(
                f"{vocab_size=} must be at least {fixed}: special tokens, 256 bytes and 10 spaced "
                "digits"
            )
        learner = tokenizers.Tokenizer(models.BPE())
        learner.pre_tokenizer = pre_tokenizers.Sequence(_split(_TRAINING_PIECES))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(string.digits),
            special_tokens=[_added(token, special=True) for token in special_tokens],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=2,
            show_progress=False,
        )
        learner.train_from_iterator(texts, trainer)
        learned = json.loads(learner.to_str())["model"]
        vocab = learned["vocab"]
        merges = [tuple(merge) for merge in learned["merges"]]
        for digit in string.digits:
            vocab[_SPACE + digit] = len(vocab)
            merges.append((_SPACE, digit))
        backend = _byte_level_bpe(vocab, merges, _split(_PIECES))
        backend.add_special_tokens([_added(token, special=True) for token in special_tokens])
        return cls(backend, eos=eos, pad=pad)

    def to_json(self) -> str:
        """The text of its ``tokenizer.json``."""
        return self._backend.to_str()

    def save(
        self, path: str | Path, *, chat_template: str | None = None, architecture: str | None = None
    ) -> None:
        """Writes a ``tokenizer.json``; what transformers needs with it goes into files beside it:
        special tokens into ``tokenizer_config.json`` and ``special_tokens_map.json``, the chat
        template (``chat_template`` where the tokenizer brought none) into ``chat_template.jinja``,
        named ones into a folder.

        architecture: ``model_type`` of the model. For a "qwen2" transformers 5 takes Qwen2's class
        and its rules for cutting text, whatever class is named. A tokenizer with other rules then
        gets a class of its own in a file beside it. Nobody who reads the folder has to run that
        file: where code is not trusted, the class that is named counts again.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        special = {"eos_token": self.eos, "pad_token": self.pad}
        if self.bos is not None:
            special["bos_token"] = self.bos
        template = chat_template if self.chat_template is None else self.chat_template
        own_class = architecture == "qwen2" and not self._cuts_as_qwen2()
        write_beside(path.parent, special, template, self.named_templates, own_class)

    def _cuts_as_qwen2(self) -> bool:
        """True if text is normalised and cut before merging as Qwen2's own class does it."""
        like = tokenizers.Tokenizer(models.BPE())
        like.normalizer = normalizers.NFC()
        like.pre_tokenizer = pre_tokenizers.Sequence(_split([_QWEN2_PIECES]))
        own, wanted = (json.loads(x.to_str()) for x in (self._backend, like))
        for steps in (own, wanted):
            for step in (steps["pre_tokenizer"] or {}).get("pretokenizers", []):
                step.pop("trim_offsets", None)  # changes no id
        return all(own[part] == wanted[part] for part in ("normalizer", "pre_tokenizer"))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens that it contains are recognised unless they are quoted
        (``marks.quote``), none are added. Text without marks has the same ids quoted or not.
        """
        if not is_quoted(text) and not self._respelled:
            return self._backend.encode(text, add_special_tokens=False).ids
        cover = covered(text)
        whole = self._backend.encode(cover, add_special_tokens=False)
        ids: list[int] = []
        at = 0
        for id, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            # white space beside a mark may belong to its token
            if id in self._mark_texts and cover[start:end].strip() == self._mark_texts[id].strip():
                ids += self._encode_plain(unquote(text[at:start]), at == 0)
                ids.append(id)
                at = end
        return ids + self._encode_plain(unquote(text[at:]), at == 0)

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        """Ids of a text in which nothing is a mark. first: whether nothing stands before it."""
        begin, behind, ids = self._plain
        backend = begin if first else behind
        return [ids.get(id, id) for id in backend.encode(text, add_special_tokens=False).ids]

    @functools.cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer without its marks, for the beginning of a text and for what stands behind
        a mark; and the ids of tokens that have others in it.
        """
        fields = json.loads(self._backend.to_str())
        marks = self.marks.texts
        model = fields["model"]
        # a mark that is in the vocabulary keeps its id, under a name that no text can reach
        model["vocab"] = {
            f"\ufdd1{text}" if text in marks else text: id for text, id in model["vocab"].items()
        }
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if not marks & {left, right, left + right}
        ]
        words = [each for each in fields["added_tokens"] if each["id"] not in self._mark_texts]
        fields["added_tokens"] = words
        begin = behind = tokenizers.Tokenizer.from_str(json.dumps(fields))
        steps = fields["pre_tokenizer"] or {}
        # one kind puts a space in front of a text, but not behind a mark
        spaced = [
            step
            for step in (steps, *steps.get("pretokenizers", ()))
            if step.get("prepend_scheme") == "first"
        ]
        if spaced:
            for step in spaced:
                step["prepend_scheme"] = "never"
            behind = tokenizers.Tokenizer.from_str(json.dumps(fields))
        return begin, behind, {begin.token_to_id(each["content"]): each["id"] for each in words}

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, special tokens included; bytes that are not UTF-8 (a cut character)
        become U+FFFD.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def decode_quoted(self, ids: Sequence[int]) -> str:
        """As ``decode``, with marks quoted that are no special tokens but spelled in others."""
        pieces = []
        at = 0
        for place, id in enumerate([*ids, None]):
            if id is None or id in self._mark_texts:
                mark = "" if id is None else self._mark_texts[id]
                pieces += [self.marks.quote(self.decode(ids[at:place]), mark), mark]
                at = place + 1
        return "".join(pieces)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Text -> id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_id(self, token: str) -> int:
        """Id of a token by its text; raises ValueError when there is no such token."""
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{token!r} is not one of the tokenizer's {self._backend.get_vocab_size()} tokens"
            )
        return token_id


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _split(pieces: Sequence[str]) -> list[pre_tokenizers.PreTokenizer]:
    cut = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="isolated")
    return [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _digits_apart() -> list[pre_tokenizers.PreTokenizer]:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


# tokenizer.ggml.pre of a GGUF file -> how text is cut before merging.
_PRE_TOKENIZERS: dict[str, Callable[[], list[pre_tokenizers.PreTokenizer]]] = {
    "smollm": _digits_apart,
    "qwen2": lambda: _split([_QWEN2_PIECES]),
    "llama-bpe": lambda: _split([_LLAMA3_PIECES]),
}


def _byte_level_bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    steps: list,
    *,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """ignore_merges: a piece that is a token as a whole is that token, whatever merges give."""
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend
