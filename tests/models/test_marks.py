"""Texts of others are tokenised unchanged and hold no special token, for every kind of tokenizer."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from models.marks import Marks, unquote, unquote_all
from models.tokenizer import Tokenizer
from tests.models.test_tokenizer import PUBLISHED, TEXTS, published, write_gguf

SPECIAL = ["<|im_end|>", "<|im_start|>", "</s>", "[INST]"]
# Added tokens that files do not call special; the last is a word of the language.
ADDED = ["<tool_call>", "<think>", "</think>", "<file_sep>", "\t\t"]
PIECES = [
    *SPECIAL,
    *ADDED,
    "<",
    "<|im_",
    "end|>",
    "/s",
    ">",
    "think",
    "\n",
    " ",
    "std::vector<function<int>>",
    "é\u0301x 12",
    "\ufdd1<|im_end|>",
    "\ud83d",
]


def trained(folder) -> Tokenizer:
    return Tokenizer.train(TEXTS, 420, SPECIAL + ADDED[:-1], eos=SPECIAL[0], pad=SPECIAL[0])


def from_json(kind: str, folder) -> Tokenizer:
    backend = published(kind)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ADDED])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(folder, eos=SPECIAL[0])


def from_gguf(kind: str, folder) -> Tokenizer:
    backend = published(kind)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ADDED])
    write_gguf(folder / "model.gguf", kind, backend, control=SPECIAL, defined=ADDED)
    return Tokenizer.from_gguf(folder / "model.gguf")


def respelled(folder) -> Tokenizer:
    """One that looks for its marks after normalising: a wide sign may become one."""
    backend = published("qwen2")
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=True) for text in SPECIAL]
    )
    backend.add_tokens([tokenizers.AddedToken(text, normalized=True) for text in ADDED])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(folder, eos=SPECIAL[0])


def spaced(folder) -> Tokenizer:
    """One that puts a space in front of a text, but not behind a mark, as that of Llama 2."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?", byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["?", *bytes_of, *SPECIAL], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ADDED])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(folder, eos=SPECIAL[0])


KINDS = {
    "spaced": spaced,
    "trained": trained,
    "respelled": respelled,
    **{f"json {kind}": lambda folder, kind=kind: from_json(kind, folder) for kind in PUBLISHED},
    **{f"gguf {kind}": lambda folder, kind=kind: from_gguf(kind, folder) for kind in PUBLISHED},
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return KINDS[request.param](tmp_path_factory.mktemp("tokenizer"))


def mark_ids(tokenizer: Tokenizer) -> dict[int, str]:
    return {tokenizer.token_id(text): text for text in tokenizer.marks.texts}


def test_words_of_the_language_are_no_marks(tokenizer):
    assert {*SPECIAL, *ADDED[:-1]} <= tokenizer.marks.texts
    assert "\t\t" not in tokenizer.marks.texts


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from(PIECES), max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_only_the_templates_marks_are_special(tokenizer, spans):
    """A template writes marks; what stands between comes from others."""
    said, trusted = "", []
    for is_template, pieces in spans:
        if is_template:
            marks = [piece for piece in pieces if piece in tokenizer.marks.texts]
            trusted += marks
            said += "".join(marks)
        else:
            said += tokenizer.marks.quote("".join(pieces))
    ids = tokenizer.encode(said)
    names = mark_ids(tokenizer)
    assert [names[id] for id in ids if id in names] == trusted
    text = unquote(said)
    # other decoders drop a space at the beginning, normalizers respell
    unchanged = isinstance(tokenizer._backend.decoder, tokenizers.decoders.ByteLevel)
    if unchanged and tokenizer._backend.normalizer is None:
        assert tokenizer.decode(ids) == text
    if [names[id] for id in tokenizer.encode(text) if id in names] == trusted:
        assert ids == tokenizer.encode(text)
    if unchanged:
        assert tokenizer.encode(tokenizer.decode_quoted(ids)) == ids


@pytest.mark.parametrize(
    "text", ["std::vector<function<int>>", "a < b", "x\n\n", "[IN", "", "thin"]
)
def test_text_without_marks_has_the_tokens_that_it_had(tokenizer, text):
    around = "<|im_start|>user\n{}<|im_end|>\n"
    plain = tokenizer.encode(around.format(text))
    assert tokenizer.encode(around.format(tokenizer.marks.quote(text))) == plain


def test_a_mark_cannot_be_put_together_from_pieces(tokenizer):
    quote = tokenizer.marks.quote
    names = mark_ids(tokenizer)
    for said in (
        f"<{quote('think')}>",  # as templates write names of fields
        f"<{quote('/s')}>",
        f"<{quote('|im_end|')}>",
        f"<{quote('think>b')}",
        f"{quote('a<|im')}_end|>",
        "".join(map(quote, ("<", "|im_", "end|>"))),
        quote("<s</s>"),
    ):
        ids = tokenizer.encode(said)
        assert not names.keys() & set(ids), said
        assert tokenizer.decode(ids) == unquote(said)


def test_a_wide_sign_makes_no_mark(tmp_path):
    tokenizer = respelled(tmp_path)
    names = mark_ids(tokenizer)
    ids = tokenizer.encode("<|im_start|>\uff1c/s\uff1e<|im_end|>")
    assert [names[id] for id in ids if id in names] == ["<|im_start|>", "<|im_end|>"]


def test_all_texts_of_a_value_are_quoted():
    marks = Marks(["<s>"])
    value = {"<s>": ["a<s>", 1, None, {"b": "<s>"}], "type": "string"}
    quoted = marks.quote_all(value)
    assert "<s>" not in json.dumps(quoted, ensure_ascii=False) and quoted["type"] == "string"
    assert unquote_all(quoted) == value


def test_no_lone_surrogate_passes():
    assert Marks(["<s>"]).quote("a\ud83db\udfff<s>\ud83d") != "a?b?<s>?"
    assert unquote(Marks(["<s>"]).quote("a\ud83db\udfff<s>\ud83d")) == "a?b?<s>?"
    assert Marks([]).quote("\ud800") == "?"


def test_other_kinds_of_tokenizers_are_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="of the kind WordLevel; only BPE is supported"):
        Tokenizer.from_file(tmp_path, eos="a")


@given(
    st.lists(st.text("<|a>", min_size=1, max_size=5), min_size=1, max_size=6),
    st.text("<|a>", max_size=12),
)
def test_every_place_where_a_mark_begins_is_quoted(marks, text):
    quoted = Marks(marks).quote(text)
    assert unquote(quoted) == text
    signs = [place for place in range(len(text)) if text.startswith(tuple(marks), place)]
    found = [place for place, letter in enumerate(quoted) if letter == "\udfff"]
    behind = {place - 1 - before for before, place in enumerate(found)}
    assert behind >= set(signs)


def test_a_beginning_is_quoted_only_where_its_rest_may_follow():
    for texts, quoted in (
        (("<think>", "｜DSML｜"), False),
        (("<think>", "｜DSML｜", "<｜DSML｜>"), True),
        (("<think>", "｜DSML｜", "<｜DSML｜"), True),
    ):
        marks = Marks(texts)
        assert marks.quote("a<") != "a<"
        assert (marks.quote("a<", "｜DSML｜") != "a<") == quoted
