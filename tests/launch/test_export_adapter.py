"""What a run with adapters exports: them alone, as PEFT reads them, or a model in which they are
merged; and another run begins with them.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.export import export
from models import huggingface, huggingface_config, json_files, peft
from models.families import FAMILIES, PRESETS
from models.lora import LoRA, trained, with_trained
from models.sharding import MESHES, make_mesh
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.read_config import ConfigError, build
from rl_code.run import origin
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from tests.launch.test_export import SPECIAL, needs_transformers
from tests.models.small import narrow_preset
from tests.models.test_huggingface import GOLDEN, assert_same, logits
from tests.rl_code.run.test_run_with_picks import settings_of

NAME = "llama_tied"
LORA = LoRA(rank=2, alpha=5.0, targets=("q_proj", "o_proj", "down_proj"))
ONE = make_mesh(MESHES["one"])


@pytest.fixture(scope="module")
def adapted() -> Transformer:
    """A golden base with adapters that are not zero."""
    found = origin.find(str(GOLDEN / NAME))
    model = found.load(dataclasses.replace(found.shape(), lora=LORA), ONE)
    for name in ("q_b", "o_b", "down_b"):
        b = getattr(model.layers.lora, name)
        b[...] = 0.3 * jax.random.normal(jax.random.key(len(name)), b.shape)
    return model


@pytest.fixture(scope="module")
def workdir(adapted, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    weights = str(GOLDEN / NAME)
    tokenizer = Tokenizer.train(["def f(x):\n    return x"] * 9, 300, SPECIAL)
    origin.keep(
        folder,
        origin.find(weights),
        adapted.config,
        tokenizer,
        max_positions=288,
        stop_ids=[2],
        chat_template=FAMILIES["compact"].template,
    )
    with Checkpoints(folder, {"model": {"weights": weights}}, keep=1) as checkpoints:
        checkpoints.save(4, {"model": adapted}, {})
    return folder


@pytest.mark.long
def test_adapters_leave_alone_or_merged(workdir, adapted, tmp_path):
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    assert export(workdir, alone, adapter=True) == 4
    assert sorted(path.name for path in alone.iterdir()) == [peft.CONFIG, peft.TENSORS]
    assert json_files.read_json(alone / peft.CONFIG)["base_model_name_or_path"] == str(
        GOLDEN / NAME
    )
    found = peft.load(alone, adapted.config, ONE)
    for a, b in zip(
        jax.tree.leaves(found["layers"]), jax.tree.leaves(adapted.layers.lora), strict=True
    ):
        assert np.array_equal(a, b)
    named = dict(base="hub/model", dtype="bfloat16")
    export(workdir, tmp_path / "named", adapter=True, **named)
    content = json_files.read_json(tmp_path / "named" / peft.CONFIG)
    assert content["base_model_name_or_path"] == "hub/model"
    stored = load_file(tmp_path / "named" / peft.TENSORS).values()
    assert {array.dtype for array in stored} == {jnp.dtype("bfloat16")}

    export(workdir, whole)
    merged = huggingface.load(whole, huggingface_config.read_config(whole), ONE)
    tokens = np.load(GOLDEN / NAME / "logits.npz")["tokens"]
    base = np.load(GOLDEN / NAME / "logits.npz")["logits"]
    assert np.abs(logits(adapted, tokens) - base).max() > 0.1
    np.testing.assert_allclose(
        logits(merged, tokens), logits(adapted, tokens), rtol=1e-4, atol=1e-5
    )
    # what starts from the run is what was exported
    assert_same(origin.find(str(workdir)).load(merged.config, ONE), merged)


def test_adapters_that_are_not_there_are_refused(workdir, adapted, tmp_path):
    with pytest.raises(ConfigError, match="--base=x is for --adapter"):
        export(workdir, tmp_path / "out", base="x")
    plain = tmp_path / "plain"
    bare = dataclasses.replace(adapted.config, lora=None)
    tokenizer = origin.tokenizer_of(workdir)
    rest = dict(max_positions=9, stop_ids=[2], chat_template=None)
    origin.keep(plain, origin.find(""), bare, tokenizer, **rest)
    with pytest.raises(ConfigError, match="trained no adapters"):
        export(plain, tmp_path / "out", adapter=True)


@pytest.mark.long
def test_a_run_begins_with_exported_adapters(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())
    settings = settings_of(None, 1, attention=None)

    def run_with(**lora):
        with settings.unlocked():
            settings.model.lora = dataclasses.asdict(LORA) | lora
        return Run(build(RunConfig, settings), tmp_path / "run", "learner")

    with run_with() as run:
        adapters = jax.tree.map(lambda x: x + 0.5, trained(run.init_model()))
        model = with_trained(run.init_model(), adapters)
    folder = str(tmp_path / "alone")
    peft.save(folder, model, base=None)
    with run_with(weights=folder) as run:
        assert_same(run.init_model(), model)
    for change, words in (
        (dict(rank=3, weights=folder), r"weights = .* holds other adapters: rank=2 there, 3 here"),
        (dict(weights="nowhere"), r"config\.model\.lora\.weights = 'nowhere': .*No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_with(**change)


@needs_transformers
def test_peft_computes_the_logits_of_exported_adapters(workdir, adapted, tmp_path):
    export(workdir, tmp_path / "alone", adapter=True)
    tokens = np.load(GOLDEN / NAME / "logits.npz")["tokens"]
    np.savez(tmp_path / "alone" / "logits.npz", tokens=tokens, logits=logits(adapted, tokens))
    script = GOLDEN.parent / "make_golden_peft.py"
    command = [os.environ["TRANSFORMERS_PYTHON"], script, "--check", tmp_path / "alone"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
