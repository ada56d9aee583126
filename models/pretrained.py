"""A pretrained model at a path: a Hugging Face folder, or a GGUF file.

Errors name the path and what is wrong with it. FileNotFoundError is raised for what is missing, and
ValueError for what cannot be read or computed.
"""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from models import gguf_weights, huggingface, huggingface_config, json_files
from models.model_config import ModelConfig
from models.tokenizer import Tokenizer
from models.transformer import Transformer


def is_pretrained(path: Path) -> bool:
    """True if there is a file, or a folder with the ``config.json`` of a model."""
    if not path.is_dir():
        return path.is_file()
    try:
        return "model_type" in json_files.read_json(path / "config.json")
    except (OSError, ValueError):
        return False


def read_config(path: Path) -> ModelConfig:
    """The model's shape, with dtypes float32."""
    return huggingface_config.read_config(path) if path.is_dir() else gguf_weights.read_config(path)


def max_positions(path: Path) -> int | None:
    """The longest context that the model was trained for, where its files say it."""
    if path.is_dir():
        return huggingface_config.max_positions(json_files.read_json(path / "config.json"))
    return gguf_weights.max_positions(path)


def stop_ids(path: Path) -> frozenset[int]:
    """Ids of the tokens that end a turn by ``config.json`` and ``generation_config.json``; none for
    a GGUF file, which leaves that to its tokenizer.
    """
    files = [path / name for name in ("config.json", huggingface_config.GENERATION_FILE)]
    contents = [json_files.read_json(file) for file in files if file.is_file()]
    return frozenset().union(*map(huggingface_config.stop_ids, contents))


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder (or of a ``tokenizer.json``), or the one in a GGUF file."""
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(path)
    return Tokenizer.from_file(path)


def load(path: Path, config: ModelConfig, mesh: Mesh) -> Transformer:
    """The model, sharded over ``mesh``; ``config`` is ``read_config``'s with the dtypes wanted."""
    reader = huggingface if path.is_dir() else gguf_weights
    return reader.load(path, config, mesh)
