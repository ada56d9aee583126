"""Makes the golden files of adapters with PEFT, and checks adapters that were exported.

In an environment of its own, as for ``make_golden`` (made with torch 2.13, transformers 5.23 and
peft 0.21.2):

    pip install torch transformers safetensors peft
    python tests/models/make_golden_peft.py                     # writes golden_peft/
    python tests/models/make_golden_peft.py --check DIRECTORY   # what was exported

A directory to check holds an adapter, whose adapter_config.json names its base, and ``logits.npz``
with tokens and the project's logits. ``golden_peft/*`` have the models in ``golden/`` for bases.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
GOLDEN = HERE / "golden_peft"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# By the name of the base.
ADAPTERS = {
    "llama_tied": LoraConfig(r=3, lora_alpha=5, target_modules=ALL),
    "qwen2_untied": LoraConfig(
        r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"], use_rslora=True
    ),
    "qwen3_moe": LoraConfig(r=2, lora_alpha=2, target_modules=ALL[:4], lora_dropout=0.1),
}


def base_of(directory: Path | str) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.numpy()


def make(name: str) -> None:
    """Writes an adapter whose numbers all move the logits, and these."""
    torch.manual_seed(sum(name.encode()))
    base = HERE / "golden" / name
    tokens = np.load(base / "logits.npz")["tokens"]
    plain = logits_of(base_of(base), tokens)
    ADAPTERS[name].task_type = "CAUSAL_LM"
    model = get_peft_model(base_of(base), ADAPTERS[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.peft_config["default"].base_model_name_or_path = name
    directory = GOLDEN / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "README.md").unlink()
    logits = logits_of(model, tokens)
    assert np.abs(logits - plain).max() > 0.1
    np.savez(directory / "logits.npz", logits=logits)


def check(directory: Path) -> None:
    """Raises AssertionError unless PEFT computes the logits of ``logits.npz`` from the adapter
    beside it, and finds every adapter that the config names in the file.
    """
    golden = np.load(directory / "logits.npz")
    config = PeftConfig.from_pretrained(directory)
    model = PeftModel.from_pretrained(base_of(config.base_model_name_or_path), directory)
    loading = model.load_adapter(directory, "again")
    assert not loading.unexpected_keys, loading.unexpected_keys
    assert not [key for key in loading.missing_keys if "lora_" in key]
    found = logits_of(model, golden["tokens"])
    print("largest difference", np.abs(found - golden["logits"]).max())
    print("largest logit", np.abs(found).max())
    np.testing.assert_allclose(found, golden["logits"], rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", type=Path, help="an adapter with a logits.npz to compare with")
    directory = parser.parse_args().check
    if directory:
        check(directory)
    else:
        for name in ADAPTERS:
            make(name)
