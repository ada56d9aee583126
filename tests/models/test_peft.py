"""Adapters in PEFT's format: PEFT's logits, files that come back as they were, errors that say what
is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import huggingface, huggingface_config, peft
from models.adapted import with_adapters
from models.sharding import MESHES, MeshConfig, make_mesh
from tests.models.test_huggingface import GOLDEN, logits

ADAPTERS = GOLDEN.parent / "golden_peft"
NAMES = sorted(path.name for path in ADAPTERS.iterdir())


def load(directory: Path, name: str, mesh):
    """The golden base of this name with the adapters of a folder."""
    config = huggingface_config.read_config(GOLDEN / name)
    lora = peft.read_config(directory)
    base = huggingface.load(GOLDEN / name, config, mesh)
    adapters = peft.load(directory, dataclasses.replace(config, lora=lora), mesh)
    return with_adapters(base, lora, adapters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick(first=1)
def test_logits_are_those_of_peft_and_an_export_has_its_tensors(name, tmp_path):
    model = load(ADAPTERS / name, name, make_mesh(MESHES["one"]))
    tokens = np.load(GOLDEN / name / "logits.npz")["tokens"]
    golden = np.load(ADAPTERS / name / "logits.npz")["logits"]
    np.testing.assert_allclose(logits(model, tokens), golden, rtol=1e-4, atol=1e-5)
    # from a mesh that cuts the adapters, bit for bit
    peft.save(tmp_path, load(ADAPTERS / name, name, make_mesh(MeshConfig(2, 2, 2))), base=name)
    here, there = (load_file(path / peft.TENSORS) for path in (tmp_path, ADAPTERS / name))
    assert here.keys() == there.keys()
    assert all(
        np.array_equal(here[key], x) and here[key].dtype == x.dtype for key, x in there.items()
    )
    mine, theirs = (
        json.loads((path / peft.CONFIG).read_text()) for path in (tmp_path, ADAPTERS / name)
    )
    theirs["target_modules"] = [x for x in mine["target_modules"] if x in theirs["target_modules"]]
    assert mine == {key: theirs[key] for key in mine} | {"lora_dropout": 0.0}
    with pytest.raises(FileExistsError, match=r"already holds adapter_config\.json"):
        peft.save(tmp_path, model, base=name)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(peft_type="IA3"), "peft_type='IA3' is not supported, only 'LORA'"),
        (dict(use_dora=True), "use_dora=True is not supported, only a LoRA without it"),
        (dict(bias="all"), "bias='all' is not supported"),
        (dict(rank_pattern={"q_proj": 4}), "rank_pattern={'q_proj': 4} is not supported"),
        (dict(target_modules="all-linear"), "target_modules='all-linear' is a pattern"),
        (dict(target_modules=["lm_head"]), "targets has lm_head; it may have q_proj"),
        (dict(init_lora_weights="pissa"), "'pissa' is not supported: it changes the base"),
        (dict(r=0), "rank=0 must be at least 1"),
        (dict(r=5), "holds other adapters: rank=5 there, 3 here"),
    ],
)
def test_adapters_of_another_kind_are_refused(change, words, tmp_path):
    folder = shutil.copytree(ADAPTERS / "llama_tied", tmp_path / "adapter")
    lora = peft.read_config(folder)
    config = dataclasses.replace(huggingface_config.read_config(GOLDEN / "llama_tied"), lora=lora)
    content = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=re.escape(words)):
        peft.check(folder, config)


def test_adapters_of_another_base_are_refused(tmp_path):
    folder = shutil.copytree(ADAPTERS / "llama_tied", tmp_path / "adapter")
    lora = peft.read_config(folder)
    config = dataclasses.replace(huggingface_config.read_config(GOLDEN / "llama_tied"), lora=lora)
    peft.check(folder, config)
    wide = dataclasses.replace(config, embed_dim=48)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    words = f"it was made for 'llama_tied':\n  {name}: expected (3, 48), found (3, 32)"
    with pytest.raises(ValueError, match=re.escape(words)):
        peft.check(folder, wide)
    tensors = load_file(folder / peft.TENSORS)
    tensors["more"] = tensors.pop(name)
    save_file(tensors, folder / peft.TENSORS)
    with pytest.raises(ValueError, match=re.escape("expected (3, 32), found no such tensor")):
        peft.check(folder, config)
    with pytest.raises(ValueError, match="more: expected no such tensor"):
        peft.check(folder, config)
    (folder / peft.TENSORS).write_bytes(b"broken")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        peft.check(folder, config)
    (folder / peft.TENSORS).unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors does not exist"):
        peft.check(folder, config)
