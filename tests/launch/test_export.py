"""A trained model leaves as a Hugging Face folder, bit for bit, also from several processes, and
another run starts from it.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from attention.methods.api import METHODS
from configs import quickstart
from launch.export import export
from models import huggingface, json_files, pretrained
from models.chat import render
from models.families import FAMILIES
from models.padding import pad, pad_config
from models.sharding import MESHES, make_mesh
from models.tokenizer import Tokenizer
from models.transformer import Transformer, abstract_model
from rl_code.checkpoint import checkpoint, record
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.read_config import ConfigError, build
from rl_code.run import origin
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from tests import programs
from tests.models.small import small_config
from tests.models.test_huggingface import GOLDEN, NAMES, assert_same, logits, random_model

SPECIAL = ["<|pad|>", "<|bos|>", "<|eot|>", "<|call|>"]
TEMPLATE = FAMILIES["compact"].template
ONE = MESHES["one"]
# As the tokenizer.json of Qwen2 has it.
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def f(x):\n    return x"] * 9, 300, SPECIAL)


def save(workdir: Path, step: int, model: Transformer, score: float | None = None) -> None:
    """The model as a run's checkpoint."""
    with Checkpoints(workdir, {}, keep=2) as checkpoints:
        checkpoints.save(step, {"model": model}, {}, score)


def keep(workdir: Path, model: Transformer, tokenizer: Tokenizer, weights: str = "") -> None:
    """What a run keeps of its model."""
    origin.keep(
        workdir,
        origin.find(weights),
        model.config,
        tokenizer,
        max_positions=288,
        stop_ids=[2],
        chat_template=TEMPLATE,
    )


@pytest.fixture
def workdir(tokenizer, tmp_path) -> Path:
    """Of a run with checkpoints of two models."""
    folder = tmp_path / "run"
    model = random_model(small_config(vocab_size=300, qk_norm=True, num_layers=2))
    keep(folder, model, tokenizer)
    save(folder, 3, jax.tree.map(lambda x: -x, model))
    save(folder, 5, model)
    return folder


@pytest.mark.long
def test_padding_is_dropped_and_other_padding_takes_its_place(tokenizer, tmp_path):
    model = random_model(small_config(vocab_size=300, qk_norm=True, num_layers=2))
    workdir = tmp_path / "run"
    keep(workdir, model, tokenizer)
    of_three, of_eight = (abstract_model(pad_config(model.config, n)) for n in (3, 8))
    padded = jax.jit(lambda x: pad(x, of_three))(model)
    with Checkpoints(workdir, {"model": {"pad_for": 3}}, keep=1) as checkpoints:
        checkpoints.save(5, {"model": padded}, {})
    export(workdir, tmp_path / "out")
    exported = pretrained.load(tmp_path / "out", model.config, make_mesh(ONE))
    assert_same(exported, model)
    mesh = make_mesh(MESHES["host8"])
    found, _ = origin.load_checkpoint(workdir, of_eight.config, mesh, None)
    assert_same(found, jax.jit(lambda x: pad(x, of_eight))(model))


def test_an_exported_model_is_the_trained_one_bit_for_bit(workdir, tokenizer, tmp_path):
    model = random_model(small_config(vocab_size=300, qk_norm=True, num_layers=2))
    out = tmp_path / "out"
    assert export(workdir, out, max_file_bytes=20_000) == 5
    assert_same(pretrained.load(out, pretrained.read_config(out), make_mesh(ONE)), model)
    assert len(list(out.glob("*.safetensors"))) > 1 and (out / huggingface.INDEX).exists()
    read = pretrained.read_tokenizer(out)
    assert (read.eos, read.pad, read.chat_template) == ("<|eot|>", "<|pad|>", TEMPLATE)
    assert read.encode("def f(y): 12") == tokenizer.encode("def f(y): 12")
    content = json.loads((out / "config.json").read_text())
    assert (content["eos_token_id"], content["pad_token_id"]) == ([2], 0)
    assert (content["model_type"], content["max_position_embeddings"]) == ("qwen3", 288)
    with pytest.raises(ConfigError, match="already holds a model"):
        export(workdir, out)
    assert export(workdir, tmp_path / "old", step=3) == 3
    table = load_file(tmp_path / "old" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(table, -np.asarray(model.embed.table[...]))


def test_an_exported_dtype_is_the_one_asked_for(workdir, tmp_path):
    export(workdir, tmp_path / "out", dtype="bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {array.dtype for array in stored.values()} == {jnp.dtype("bfloat16")}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("eos", [7, [7, 9], None])
def test_engines_stop_where_training_did_and_sample_as_they_like(tokenizer, tmp_path, eos):
    """Stop tokens of the run and of its base together; the base's way to sample is not the run's."""
    base = tmp_path / "base"
    shutil.copytree(GOLDEN / "llama_tied", base)
    way = dict(temperature=0.6, top_k=20, repetition_penalty=1.05, do_sample=True)
    before = dict(way, eos_token_id=eos, bos_token_id=5, max_length=99)
    (base / "generation_config.json").write_text(json.dumps(before))
    content = json.loads((base / "config.json").read_text())
    own = content | dict(eos_token_id=8)
    (base / "config.json").write_text(json.dumps(own))
    found = origin.find(str(base))
    model = found.load(found.shape(), make_mesh(ONE))
    given = (found, model.config, tokenizer)
    rest = dict(max_positions=288, stop_ids=[2, 3], chat_template=TEMPLATE)
    for name, own_tokenizer in (("own", True), ("other", False)):
        origin.keep(tmp_path / name, *given, **rest, own_tokenizer=own_tokenizer)
        save(tmp_path / name, 1, model)
    # a fork that goes on with another protocol, and one with the same
    origin.keep(tmp_path / "own", *given, **rest | dict(stop_ids=[4]), own_tokenizer=True)
    origin.keep(tmp_path / "own", *given, **rest | dict(stop_ids=[4]), own_tokenizer=True)
    of_base = {8, *(eos if isinstance(eos, list) else [eos] if eos else [])}
    for name, ids in (("own", {2, 3, 4} | of_base), ("other", {2, 3})):
        export(tmp_path / name, tmp_path / f"{name} out")
        for file in ("config.json", "generation_config.json"):
            written = json.loads((tmp_path / f"{name} out" / file).read_text())
            assert written["eos_token_id"] == sorted(ids) and written["pad_token_id"] == 0
            assert not written.keys() & (way.keys() | {"max_length"})


def test_a_dtype_that_cannot_hold_a_weight_is_refused_before_anything_is_written(
    workdir, tokenizer, tmp_path
):
    model = random_model(small_config(vocab_size=300, qk_norm=True, num_layers=2))
    model.layers.up[...] = model.layers.up[...].at[1, 2, 3].set(-70_000.0)
    save(workdir, 8, model)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"'float16' holds numbers up to 65504.*up.*with 70000"):
        export(workdir, out, dtype="float16")
    assert not out.exists()
    export(workdir, out, dtype="bfloat16")
    export(workdir, tmp_path / "smaller", dtype="float16", step=5)


def test_a_tokenizer_trained_here_is_read_as_written_beside_a_qwen2(tokenizer, tmp_path):
    """transformers 5 takes Qwen2's class for that architecture, unless the folder has its own."""
    for architecture in ("llama", "qwen2", "qwen3"):
        tokenizer.save(tmp_path / architecture / "tokenizer.json", architecture=architecture)
        content = json.loads((tmp_path / architecture / "tokenizer_config.json").read_text())
        file = tmp_path / architecture / "tokenization_as_written.py"
        assert file.exists() == ("auto_map" in content) == (architecture == "qwen2")
    tokenizer.save(tmp_path / "qwen2" / "tokenizer.json", architecture="qwen2")
    content = json.loads((tmp_path / "qwen2" / "tokenizer_config.json").read_text())
    assert content["auto_map"] == {"AutoTokenizer": [None, "tokenization_as_written.AsWritten"]}
    written = ast.parse((tmp_path / "qwen2" / "tokenization_as_written.py").read_text())
    assert [node.name for node in written.body if isinstance(node, ast.ClassDef)] == ["AsWritten"]
    # Qwen2's own way to cut text needs none of that
    backend = tokenizers.Tokenizer.from_str(
        (tmp_path / "qwen2" / "tokenizer.json").read_text(encoding="utf-8")
    )
    split = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(QWEN2_PIECES), behavior="isolated", invert=False
    )
    level = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    backend.normalizer = tokenizers.normalizers.NFC()
    like = Tokenizer(backend, eos="<|eot|>", pad="<|pad|>")
    like.save(tmp_path / "like" / "tokenizer.json", architecture="qwen2")
    assert "auto_map" not in (tmp_path / "like" / "tokenizer_config.json").read_text()


@pytest.mark.long
def test_two_processes_write_what_one_does(workdir, tmp_path):
    export(workdir, tmp_path / "one", max_file_bytes=20_000)
    arguments = [f"--workdir={workdir}", "--tensor=2", "--file_gb=2e-5", "--processes=2"]
    arguments += [f"--out={tmp_path / 'two'}", f"--coordinator=127.0.0.1:{programs.free_port()}"]
    running = [
        programs.start("launch.export", *arguments, f"--process={number}", devices=1)
        for number in range(2)
    ]
    output = [process.communicate(timeout=400)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], output
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.fixture
def summed_by_the_host(monkeypatch):
    """Checksums of checkpoints without a program for each shape."""

    def sums(named):
        return {
            name: hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:16]
            for name, x in named.items()
        }

    monkeypatch.setattr(checkpoint, "start_checksums", sums)
    monkeypatch.setattr(checkpoint, "finish_checksums", lambda sums: sums)
    monkeypatch.setattr(record, "array_checksums", sums)


# the quick case is the one whose programs are smallest
@pytest.mark.quick(first=1)
@pytest.mark.parametrize("name", sorted(NAMES, key=lambda name: name != "llama_tied"))
@pytest.mark.usefixtures("summed_by_the_host")
def test_a_folder_that_goes_through_a_run_keeps_its_logits(name, tokenizer, tmp_path):
    found = origin.find(str(GOLDEN / name))
    model = found.load(found.shape(), make_mesh(ONE))
    keep(tmp_path / "run", model, tokenizer, str(GOLDEN / name))
    save(tmp_path / "run", 1, model)
    export(tmp_path / "run", tmp_path / "out")
    loaded = pretrained.load(
        tmp_path / "out", pretrained.read_config(tmp_path / "out"), make_mesh(ONE)
    )
    # equal configs and bits have equal logits, which tests/models/test_huggingface.py compares with
    # those of transformers
    assert_same(loaded, model)
    content = json_files.read_json(tmp_path / "out" / "config.json")
    assert content["max_position_embeddings"] == 1024


needs_transformers = pytest.mark.skipif(
    "TRANSFORMERS_PYTHON" not in os.environ,
    reason="TRANSFORMERS_PYTHON does not name a Python that has transformers (see make_golden.py)",
)


def check_with_transformers(folder: Path) -> None:
    """Compares a folder's model and tokenizer with what the files beside them say."""
    script = GOLDEN.parent / "make_golden.py"
    command = [os.environ["TRANSFORMERS_PYTHON"], script, "--check", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    print(folder.name, done.stdout)
    assert done.returncode == 0, done.stderr


@needs_transformers
@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_logits_of_an_exported_model(name, tokenizer, tmp_path):
    found = origin.find(str(GOLDEN / name))
    model = found.load(found.shape(), make_mesh(ONE))
    model = jax.tree.map(lambda x: x * 1.01, model)  # weights that no file has
    keep(tmp_path / "run", model, tokenizer, str(GOLDEN / name))
    save(tmp_path / "run", 1, model)
    export(tmp_path / "run", tmp_path / name, max_file_bytes=20_000)
    tokens = np.load(GOLDEN / name / "logits.npz")["tokens"]
    np.savez(tmp_path / name / "logits.npz", tokens=tokens, logits=logits(model, tokens))
    check_with_transformers(tmp_path / name)


READ_TEXTS = """
import json, sys
from transformers import AutoTokenizer
texts = json.load(sys.stdin)
found = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=json.loads(sys.argv[2]))
json.dump([found.encode(text, add_special_tokens=False) for text in texts], sys.stdout)
"""


@needs_transformers
@pytest.mark.parametrize("trust", ["null", "false", "true"])
@pytest.mark.parametrize("name", NAMES)
def test_transformers_gives_the_ids_of_a_tokenizer_trained_here(name, trust, tokenizer, tmp_path):
    found = origin.find(str(GOLDEN / name))
    model = found.load(found.shape(), make_mesh(ONE))
    keep(tmp_path / "run", model, tokenizer, str(GOLDEN / name))
    save(tmp_path / "run", 1, model)
    export(tmp_path / "run", tmp_path / "out")
    texts = ["def f(x):\n    return 12", "don't  a\tb \n\n  c", "1234 <|eot|> e\u0301"]
    command = [os.environ["TRANSFORMERS_PYTHON"], "-c", READ_TEXTS, tmp_path / "out", trust]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [tokenizer.encode(text) for text in texts]


@needs_transformers
def test_transformers_loads_a_model_trained_from_scratch(tmp_path):
    with Run(build(RunConfig, quickstart.get_config("smoke")), tmp_path / "run") as run:
        model = run.init_model()
        save(tmp_path / "run", 1, model)
        export(tmp_path / "run", tmp_path / "tiny")
        texts = ["def f(x):\n    return 12", "naïve <|eot|> 日本", "<|bos|>  a\tb"]
        messages = [{"role": "user", "content": "fix it"}]
        expected = {
            "texts": [(text, run.tokenizer.encode(text)) for text in texts],
            "special": [run.tokenizer.eos, run.tokenizer.pad],
            "messages": messages,
            "rendered": render("compact", messages),
            "stop_ids": [run.tokenizer.eos_id],
        }
        tokens = np.asarray([run.tokenizer.encode(" ".join(texts))])
    (tmp_path / "tiny" / "texts.json").write_text(json.dumps(expected))
    np.savez(tmp_path / "tiny" / "logits.npz", tokens=tokens, logits=logits(model, tokens))
    check_with_transformers(tmp_path / "tiny")


def test_attention_that_others_do_not_know_is_refused(tokenizer, tmp_path):
    window = METHODS["window"](4)
    model = random_model(small_config(vocab_size=300, num_layers=2, attention=(window,)))
    keep(tmp_path / "run", model, tokenizer)
    save(tmp_path / "run", 1, model)
    with pytest.raises(ConfigError, match=r"attends by .*for which Hugging Face has no words"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.long
def test_a_run_starts_from_another_runs_checkpoint(tmp_path):
    settings = quickstart.get_config("smoke")
    with Run(build(RunConfig, settings), tmp_path / "a") as first:
        model = first.init_model()
        save(tmp_path / "a", 7, jax.tree.map(lambda x: x + 1, model), score=0.9)
        save(tmp_path / "a", 9, jax.tree.map(lambda x: x + 2, model), score=0.8)
    settings.model.weights = str(tmp_path / "a")
    with Run(build(RunConfig, settings), tmp_path / "b") as second:
        assert_same(second.init_model(), jax.tree.map(lambda x: x + 2, model))
        assert second.tokenizer.encode("return 12") == first.tokenizer.encode("return 12")
    settings.model.update(weights=f"{tmp_path / 'a'}@7", preset="")
    del settings.tokenizer
    with Run(build(RunConfig, settings), tmp_path / "c") as third:
        assert third.model_config == first.model_config
        assert_same(third.init_model(), jax.tree.map(lambda x: x + 1, model))
    best = origin.find(f"{tmp_path / 'a'}@best")
    assert_same(best.load(first.model_config, make_mesh(ONE)), jax.tree.map(lambda x: x + 1, model))
    assert export(tmp_path / "a", tmp_path / "best", step="best") == 7
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"config\.model\.weights = .*a@7'.*no checkpoint"):
        Run(build(RunConfig, settings), tmp_path / "d")
    settings.model.weights = str(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"config\.model\.weights = .*neither .* nor checkpoints"):
        Run(build(RunConfig, settings), tmp_path / "d")


def with_weights(weights: str, **model) -> RunConfig:
    """The quickstart's smoke config with these weights and their tokenizer."""
    settings = quickstart.get_config("smoke")
    settings.model.update(weights=weights, preset="", **model)
    del settings.tokenizer
    return build(RunConfig, settings)


def test_weights_of_any_family_tell_their_shape(tokenizer, tmp_path):
    model = random_model(small_config(vocab_size=1000, qkv_bias=True, tied_embeddings=False))
    huggingface.save(tmp_path / "hf", model, max_positions=512)
    with pytest.raises(ConfigError, match=r"config\.model\.weights = .*tokenizer\.json does not"):
        Run(with_weights(str(tmp_path / "hf")), tmp_path / "run")
    tokenizer.save(tmp_path / "hf" / "tokenizer.json")
    with Run(with_weights(str(tmp_path / "hf")), tmp_path / "run") as run:
        assert dataclasses.replace(run.model_config, dtype="float32") == model.config
        assert run.tokenizer.vocab_size == tokenizer.vocab_size
        assert_same(run.init_model(), model)
    content = json_files.read_json(tmp_path / "hf" / "config.json")
    shorter = content | {"max_position_embeddings": run.config.limits.tokens - 1}
    json_files.write_json(tmp_path / "hf" / "config.json", shorter)
    words = r"config\.limits\.tokens = (\d+): the model at '.*hf' was trained for contexts of"
    with pytest.raises(ConfigError, match=words):
        Run(with_weights(str(tmp_path / "hf")), tmp_path / "other")
    with Run(
        with_weights(str(tmp_path / "hf"), longer_context=True), tmp_path / "longer"
    ) as longer:
        longer.init_model()
    kept = json_files.read_json(tmp_path / "longer" / origin.FOLDER / "config.json")
    assert kept["max_position_embeddings"] >= run.config.limits.tokens
    json_files.write_json(tmp_path / "hf" / "config.json", content | {"mlp_bias": True})
    with pytest.raises(ConfigError, match=r"config\.model\.weights = .*mlp_bias=True"):
        Run(with_weights(str(tmp_path / "hf")), tmp_path / "other")


def test_a_preset_that_is_another_model_is_refused(tokenizer, tmp_path):
    model = random_model(small_config(vocab_size=300, qk_norm=True, num_layers=2))
    huggingface.save(tmp_path, model, max_positions=64)
    tokenizer.save(tmp_path / "tokenizer.json")
    settings = quickstart.get_config("smoke")
    settings.model.weights = str(tmp_path)
    del settings.tokenizer
    with pytest.raises(
        ConfigError, match=r"'tiny' is not the model at .*embed_dim = 128 there, 16"
    ):
        Run(build(RunConfig, settings), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"config\.tokenizer\.source = 'train': the weights at"):
        settings.tokenizer = dict(source="train")
        Run(build(RunConfig, settings), tmp_path / "run")


@pytest.mark.parametrize(
    ("weights", "path", "words"),
    [
        ("nowhere", "", r"config\.model\.weights = '.*nowhere' does not exist"),
        ("nowhere@12", "", r"config\.model\.weights = '.*nowhere@12': .*has no checkpoint"),
        ("cut.gguf", "", r"config\.model\.weights = '.*cut\.gguf': .*not a whole GGUF file"),
        ("", "nowhere.json", r"config\.tokenizer\.path = '.*nowhere\.json': .* does not exist"),
        ("", "cut.gguf", r"config\.tokenizer\.path = '.*cut\.gguf': .*not a whole GGUF file"),
    ],
)
def test_paths_that_hold_nothing_are_named_by_their_key(weights, path, words, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    settings = quickstart.get_config("smoke")
    settings.model.weights = weights and str(tmp_path / weights)
    settings.tokenizer = dict(source="file", path=path and str(tmp_path / path))
    with pytest.raises(ConfigError, match=words) as error:
        Run(build(RunConfig, settings), tmp_path / "run")
    assert "\n" not in str(error.value)
