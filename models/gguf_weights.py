"""Reads GGUF files: their metadata as a ModelConfig, and their tensors, of any quantisation, as
sharded arrays of floats.

Files of some architectures (llama) keep the rows of q and k in the order of interleaved RoPE pairs.
They are put back into the half-split order of Hugging Face, which is also that of this model.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from jax.sharding import Mesh

from models import families, weights
from models.gguf_file import open_gguf
from models.model_config import ModelConfig
from models.transformer import Transformer


def read_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a GGUF file, with dtypes float32.

    Raises ValueError that names the metadata that is missing or unsupported.
    """
    return _config(Path(path), open_gguf(path))


def load(path: str | Path, config: ModelConfig, mesh: Mesh) -> Transformer:
    """The model of a GGUF file, dequantised and sharded over ``mesh``.

    config: that of ``read_config``, perhaps with other dtypes.

    Raises ValueError naming each tensor that is missing, unexpected or of another shape.
    """
    return weights.load(_File(Path(path), config), "gguf", config, mesh)


def _config(path: Path, reader: gguf.GGUFReader) -> ModelConfig:
    def value(key: str):
        if key not in reader.fields:
            raise ValueError(f"{path} has no metadata {key!r}")
        return reader.fields[key].contents()

    kind = value("general.architecture")
    try:
        family = families.of_architecture(kind)
    except ValueError as error:
        raise ValueError(f"{path}: architecture {error}") from error
    for name, harmless in _HARMLESS.items():
        key = f"{kind}.{name}"
        if key in reader.fields and value(key) not in harmless:
            raise ValueError(
                f"{path} has {key}={value(key)!r}, which is not supported, only {harmless[0]!r}"
            )
    names = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise ValueError(
            f"{path} has the tensor 'rope_freqs.weight' (a stretched RoPE), which is not "
            "supported; use the model's Hugging Face folder"
        )
    heads = value(f"{kind}.attention.head_count")
    head_dim = value(f"{kind}.embedding_length") // heads
    if f"{kind}.attention.key_length" in reader.fields:
        head_dim = value(f"{kind}.attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        key = f"{kind}.{name}"
        if key in reader.fields and value(key) != head_dim:
            raise ValueError(
                f"{path} has {key}={value(key)}, which is not supported, only the size of a head, "
                f"{head_dim}"
            )
    return ModelConfig(
        vocab_size=int(names["token_embd.weight"][1])
        if "token_embd.weight" in names
        else value(f"{kind}.vocab_size"),
        embed_dim=value(f"{kind}.embedding_length"),
        mlp_dim=value(f"{kind}.feed_forward_length"),
        num_layers=value(f"{kind}.block_count"),
        num_heads=heads,
        num_kv_heads=value(f"{kind}.attention.head_count_kv"),
        head_dim=head_dim,
        rope_theta=float(value(f"{kind}.rope.freq_base")),
        # Stored as float32, which turns 1e-5 into 9.999999747378752e-06.
        norm_eps=float(str(np.float32(value(f"{kind}.attention.layer_norm_rms_epsilon")))),
        tied_embeddings=bool("output.weight" not in names or _output_is_embedding(reader)),
        architecture=family.architecture,
        **family.options,
    )


def max_positions(path: str | Path) -> int | None:
    """The longest context that the file's model was trained for, where the file says it."""
    fields = open_gguf(path).fields
    key = f"{fields['general.architecture'].contents()}.context_length"
    return int(fields[key].contents()) if key in fields else None


# Metadata (behind the architecture's name) that changes what a model computes -> the values under
# which it changes nothing.
_HARMLESS = {
    "rope.scaling.type": ("none",),
    # a linear stretch, also where no type is said
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "attention.layer_norm_epsilon": (),
    "use_parallel_residual": (False,),
}


def _output_is_embedding(reader: gguf.GGUFReader) -> bool:
    """True if ``output.weight`` is the table of embeddings once more, perhaps in another precision.

    Files of models with tied embeddings often hold the table twice, the output in more bits. Two
    quantisations of one table differ by a few percent; two tables have nothing in common. A few
    hundred rows tell.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    table, output = tensors["token_embd.weight"], tensors["output.weight"]
    if list(table.shape) != list(output.shape):
        return False
    rows = np.linspace(0, len(table.data) - 1, 256, dtype=np.int64)
    first = gguf.dequantize(table.data[rows], table.tensor_type)
    second = gguf.dequantize(output.data[rows], output.tensor_type)
    return bool(np.linalg.norm(first - second) < 0.25 * np.linalg.norm(first))


class _File:
    """A GGUF file as a ``weights.OpenCheckpoint``."""

    def __init__(self, path: Path, config: ModelConfig):
        reader = open_gguf(path)
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if config.tied_embeddings and "output.weight" in self._tensors:
            if _output_is_embedding(reader):
                output = self._tensors.pop("output.weight")
                if output.n_bytes > self._tensors["token_embd.weight"].n_bytes:
                    self._tensors["token_embd.weight"] = output  # the more precise of the two
        # GGUF lists axes from the fastest to the slowest.
        self.shapes = {
            name: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        # Heads of the tensors whose rows are in interleaved order, by the end of their names.
        self._interleaved = {}
        if families.of_config(config).interleaved_in_gguf:
            self._interleaved = {
                ".attn_q.weight": config.num_heads,
                ".attn_k.weight": config.num_kv_heads,
            }

    def read(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor in float32; whole rows are dequantised, because quantisation blocks
        lie along them.
        """
        tensor = self._tensors[name]
        heads = next((n for end, n in self._interleaved.items() if name.endswith(end)), None)
        if heads is None:
            return gguf.dequantize(tensor.data[block[0]], tensor.tensor_type)[
                (slice(None), *block[1:])
            ]
        rows, columns = self.shapes[name]
        matrix = gguf.dequantize(tensor.data, tensor.tensor_type)
        matrix = (
            matrix.reshape(heads, rows // heads // 2, 2, columns)
            .swapaxes(1, 2)
            .reshape(rows, columns)
        )
        return matrix[block]
