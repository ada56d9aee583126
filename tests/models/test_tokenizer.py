"""The tokeniser trained on the spot: reversible, deterministic, digits alone, special tokens
single.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import Tokenizer

SPECIAL = ["<|pad|>", "<|bos|>", "<|eot|>", "<|call|>"]
TEXTS = [inspect.getsource(textwrap)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 400, SPECIAL)


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(alphabet="ab 1\n<|>é"))))
def test_special_tokens_are_recognised_and_kept(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert sum(i < len(SPECIAL) for i in ids) == sum(text.count(token) for token in SPECIAL)


def test_special_tokens_have_the_first_ids(tokenizer):
    assert [tokenizer.encode(token) for token in SPECIAL] == [[i] for i in range(len(SPECIAL))]
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 0)
    assert tokenizer.vocab_size == 400


@given(number=st.integers(0, 10**12), indent=st.sampled_from(["", "x =", "\n    ", "  "]))
@settings(deadline=None)
def test_digits_join_with_nothing_but_one_space(tokenizer, number, indent):
    ids = tokenizer.encode(f"{indent} {number}")[len(tokenizer.encode(indent)) :]
    if indent == "\n    ":  # the space belongs to the indent
        ids = tokenizer.encode(str(number))
    assert len(ids) == len(str(number))
    assert tokenizer.decode(ids).strip() == str(number)


def test_spaced_digits_do_not_need_to_be_in_the_texts():
    tokenizer = Tokenizer.train(["no digit here"], 400, SPECIAL)
    assert [len(tokenizer.encode(f" {digit}")) for digit in range(10)] == [1] * 10


def test_words_of_the_texts_become_single_tokens(tokenizer):
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert len(tokenizer.encode(" self")) == 1


def test_another_process_trains_the_same_tokenizer(tokenizer, tmp_path):
    program = (
        "import inspect, textwrap; from models.tokenizer import Tokenizer;"
        "Tokenizer.train([inspect.getsource(textwrap)], 400, "
        f"{SPECIAL}).save({str(tmp_path / 'a.json')!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    tokenizer.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_saved_tokenizer_is_the_same_when_read(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "sub" / "tokenizer.json")
    read = Tokenizer.from_file(tmp_path / "sub" / "tokenizer.json")
    text = "<|bos|>def f(x):\n    return x + 12\n<|eot|>"
    assert read.encode(text) == tokenizer.encode(text)
    assert (read.vocab_size, read.eos_id, read.pad_id) == (400, 2, 0)


def test_bad_files_and_sizes_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size=100 must be at least 270"):
        Tokenizer.train(TEXTS, 100, SPECIAL)
    with pytest.raises(
        ValueError, match=r"'<\|nobody\|>' is not one of the tokeniser's 400 tokens"
    ):
        tokenizer.token_id("<|nobody|>")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="which token ends a turn"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json", eos="<|eot|>").pad_id == 2
