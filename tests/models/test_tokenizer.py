"""The tokenizer trained on the spot: reversible, deterministic, digits alone, special tokens
single.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import pytest
import tokenizers
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
        ValueError, match=r"'<\|nobody\|>' is not one of the tokenizer's 400 tokens"
    ):
        tokenizer.token_id("<|nobody|>")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_file(tmp_path).eos == "<|eot|>"  # the other file says it, too
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(ValueError, match="which token ends a turn"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json", eos="<|eot|>").pad_id == 2


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"generation_config": {"eos_token_id": [2, 1]}, "config": {"eos_token_id": 1}}, 2),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 1}}, 1),
        ({"config": {"model_type": "x", "text_config": {"eos_token_id": [1]}}}, 1),
        # the tokenizer's own words come first
        ({"tokenizer_config": {"eos_token": SPECIAL[0]}, "config": {"eos_token_id": 1}}, 0),
    ],
)
def test_the_end_of_a_turn_may_stand_only_in_the_models_files(tmp_path, tokenizer, files, end):
    tokenizer.save(tmp_path / "tokenizer.json")
    for name in ("tokenizer_config", "special_tokens_map"):
        (tmp_path / f"{name}.json").unlink()
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(tmp_path).eos_id == end


def test_an_end_of_a_turn_that_is_no_token_is_not_taken(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer.json")
    for name in ("tokenizer_config", "special_tokens_map"):
        (tmp_path / f"{name}.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(ValueError, match="which token ends a turn"):
        Tokenizer.from_file(tmp_path)


# As in the tokenizer.json that Qwen and Meta publish; the vocabularies here are small.
PUBLISHED = {
    "qwen2": (
        {"type": "NFC"},
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        False,
    ),
    "llama-bpe": (
        None,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        True,
    ),
}
END = "<|im_end|>"


def published(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer with the steps of a published one, trained on this file's texts."""
    normalizer, pattern, ignore_merges = PUBLISHED[kind]
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    to_bytes["trim_offsets"] = False
    empty = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    content = json.loads(empty.to_str())
    content["normalizer"] = normalizer
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, to_bytes]}
    content["decoder"] = to_bytes
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=alphabet, show_progress=False
    )
    texts = [*TEXTS, "I'll don't WE'RE 123 4567 89\r\n\n", Path(__file__).read_text("utf-8")]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


def write_gguf(
    path: Path, kind: str, tokenizer: tokenizers.Tokenizer, control=(), defined=()
) -> None:
    """A GGUF file that describes a tokenizer, as llama.cpp's converter writes it."""
    content = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    named = {
        **dict.fromkeys(defined, gguf.TokenType.USER_DEFINED),
        **dict.fromkeys((END, *control), gguf.TokenType.CONTROL),
    }
    kinds = [named.get(token, gguf.TokenType.NORMAL) for token in tokens]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.token_to_id(END))
    named = {"name": "tool_use", "template": "{{ tools }}"}
    default = {"name": "default", "template": "{{ messages[0].content }}"}
    writer.add_chat_template([default, named])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=PUBLISHED)
def published_and_read(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokenizer = published(request.param)
    write_gguf(path, request.param, tokenizer)
    return tokenizer, Tokenizer.from_gguf(path)


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(
        st.one_of(
            st.text(alphabet=st.characters(codec="utf-8"), max_size=8),
            st.sampled_from(["don't", "I'LL", " 1234", "e\u0301", "  x", "\r\n\n ", "def f(", END]),
        )
    )
)
def test_a_tokenizer_from_gguf_is_the_published_one(published_and_read, parts):
    tokenizer, read = published_and_read
    text = "".join(parts)
    assert read.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_from_gguf_knows_its_end_and_its_template(published_and_read, tmp_path):
    tokenizer, read = published_and_read
    assert (read.eos, read.pad, read.bos) == (END, END, None)
    assert read.chat_template == "{{ messages[0].content }}"
    assert read.named_templates == {"tool_use": "{{ tools }}"}
    read.save(tmp_path / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path)
    assert (again.eos, again.pad, again.chat_template) == (END, END, read.chat_template)
    assert again.encode(TEXTS[0]) == read.encode(TEXTS[0])
    write_gguf(tmp_path / "model.gguf", "viking", tokenizer)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre='viking' is not supported"):
        Tokenizer.from_gguf(tmp_path / "model.gguf")


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_file(tmp_path)


def rewrite(folder: Path, **config) -> Path:
    """Changes the tokenizer_config.json of a folder."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.fixture
def bare(tmp_path):
    """The folder of a tokenizer without special tokens, whose vocabulary has two of the marks."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["a b"], trainer)
    content = json.loads(backend.to_str())
    for token in ("<|end|>", "<|pad|>"):
        content["model"]["vocab"][token] = len(content["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return tmp_path


def test_tokens_that_only_the_config_names_are_special(bare):
    read = Tokenizer.from_file(rewrite(bare, pad_token={"content": "<|pad|>"}))
    size = read.vocab_size
    assert read.encode("a<|end|><|pad|>b")[1:-1] == [size - 2, size - 1]
    listed = {
        str(size + at): {"content": text, "special": text != "<word>", "normalized": False}
        for at, text in enumerate(("<|tool|>", "<word>"))
    }
    read = Tokenizer.from_file(rewrite(bare, added_tokens_decoder=listed))
    assert read.encode("<|tool|><|end|><word>") == [size, size - 2, size + 1]
    assert read.marks.texts == {"<|end|>", "<|pad|>", "<|tool|>", "<word>"}
    read.save(bare / "tokenizer.json")
    again = Tokenizer.from_file(bare)
    assert again.encode("<|tool|><|end|><word>") == [size, size - 2, size + 1]
    named = ("<|pad|>", "<|nobody|>")  # one is in no vocabulary, so no model can mean it
    rewrite(bare, additional_special_tokens=named)
    assert Tokenizer.from_file(bare).vocab_size == size + 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"added_tokens_decoder": {"9999": {"content": "<x>"}}}, "gives '<x>' the id 9999"),
        ({"added_tokens_decoder": [3]}, "added_tokens_decoder does not map ids to tokens"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder does not map ids to tokens"),
        ({"chat_template": [{"name": "a"}]}, "chat_template is neither a text nor a list"),
        ({"chat_template": {"a": 3}}, "the chat template 'a' is no text"),
        ({"eos_token": 3}, "which token ends a turn"),
    ],
)
def test_what_is_wrong_beside_a_tokenizer_is_named(bare, config, named):
    with pytest.raises(ValueError, match=named):
        Tokenizer.from_file(rewrite(bare, **config))


def test_a_config_that_is_no_object_is_named(bare):
    for text, named in (("{", "is not JSON"), ("[]", "holds no JSON object")):
        (bare / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json {named}"):
            Tokenizer.from_file(bare)


def test_templates_with_names_are_read_and_kept(bare):
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    read = Tokenizer.from_file(rewrite(bare, chat_template=listed))
    assert (read.chat_template, read.named_templates) == ("D", {"tool_use": "T"})
    read.save(bare / "sub" / "tokenizer.json")
    (bare / "sub" / "additional_chat_templates" / "rag.jinja").write_text("R")
    again = Tokenizer.from_file(bare / "sub")
    assert (again.chat_template, again.named_templates) == ("D", {"tool_use": "T", "rag": "R"})
