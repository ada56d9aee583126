"""Weights that a trainer pushes to vLLM: an engine of vLLM's own update protocol that reads
safetensors, and checksums of what the model computes with.

It runs in vLLM's environment, in each of its workers, which import it by the flag
``--worker-extension-cls=rl_code_vllm.Checksums`` (``serve`` sets it). Importing registers the
engine, which ``--weight-transfer-config='{"backend": "rl_code"}'`` then names.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "rl_code"


@dataclass
class Nothing(WeightTransferInitInfo):
    """No facts are needed before the first update."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """A folder with all weights of a version, as Hugging Face names them."""

    folder: str
    # SHA-256 of the bytes of each tensor, by its name.
    digests: dict[str, str]


class SafetensorsEngine(WeightTransferEngine):
    """Loads a model's weights from the files of a folder that the trainer has written."""

    init_info_cls = Nothing
    update_info_cls = Folder

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing is to be set up."""

    def start_weight_update(self) -> None:
        """Has vLLM load weights layer by layer, as it does with those of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """As the base class, which waits for an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Folder) -> None:
        """Loads the tensors of a folder. Raises ValueError where one is not what was sent."""
        found: dict[str, str] = {}
        self.model.load_weights(_read(Path(update_info.folder), found))
        if found != update_info.digests:
            wrong = found.items() ^ update_info.digests.items()
            names = sorted({name for name, _ in wrong})
            raise ValueError(f"{update_info.folder}: not what was sent: {', '.join(names[:5])}")

    def finish_weight_update(self) -> None:
        """Makes what the layers compute with of what was loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPUs a head that shares the embedding's matrix has a packed copy of its own. vLLM does
        # not load it, so a reload of the embedding leaves the copy as it was.
        for layer in self.model.modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held."""


class Checksums:
    """Methods that vLLM's workers get (``/collective_rpc``)."""

    model_runner: Any
    _weight_update_active: bool
    finish_weight_update: Callable[[], None]

    def rl_code_begin(self) -> None:
        """Ends an update that a trainer which died has begun; all weights will be pushed anew."""
        if self._weight_update_active:
            self.finish_weight_update()

    def rl_code_checksums(self) -> dict[str, str]:
        """SHA-256 of each matrix and vector that the model computes with, by Hugging Face's name.

        Matrices that vLLM keeps together are taken apart. Those that are cut over workers are put
        together, so every worker tells the same. Those that are packed for a CPU are read by
        multiplying the identity: what is compared is what is used.
        """
        model = self.model_runner.get_model()
        packed = getattr(model, "packed_modules_mapping", {})
        found = {}
        with torch.inference_mode():
            for path, layer in model.named_modules():
                for parameter in dict(layer.named_parameters(recurse=False)):
                    tensor = _in_use(layer, parameter)
                    above, _, leaf = path.rpartition(".")
                    names = packed.get(leaf, [leaf])
                    parts = [tensor]
                    if len(names) > 1:
                        parts = list(tensor.split(list(layer.output_partition_sizes)))
                    for at, (name, part) in enumerate(zip(names, parts, strict=True)):
                        full = ".".join(filter(None, (above, name, parameter)))
                        found[full] = _digest(_whole(layer, parameter, part, at))
        return found


def _in_use(layer: torch.nn.Module, parameter: str) -> torch.Tensor:
    """A parameter as the layer uses it, of which this worker may have a part."""
    tensor = getattr(layer, parameter).detach()
    if parameter == "weight" and hasattr(layer, "cpu_linear"):
        embeds = isinstance(layer, VocabParallelEmbedding)
        size = layer.embedding_dim if embeds else layer.input_size_per_partition
        identity = torch.eye(size, dtype=tensor.dtype)
        tensor = layer.cpu_linear(identity, tensor, None).t()
    return tensor


def _whole(layer: torch.nn.Module, parameter: str, part: torch.Tensor, at: int) -> torch.Tensor:
    """A tensor of which each worker has ``part``; of an embedding without the rows that fill it up.

    at: its place among those that the layer keeps together.
    """
    axis = None
    if isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding):
        axis = 0
    elif isinstance(layer, RowParallelLinear) and parameter == "weight":
        axis = 1
    if axis is not None and layer.tp_size > 1:
        rows = len(part)
        part = tensor_model_parallel_all_gather(part.contiguous(), axis)
        if isinstance(layer, QKVParallelLinear) and at > 0:
            # workers that share a head of keys have the same rows
            parts = part.split(rows)[:: layer.num_kv_head_replicas]
            part = torch.cat(parts)
    return part[: layer.org_vocab_size] if isinstance(layer, VocabParallelEmbedding) else part


def _read(folder: Path, found: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder's files; notes the SHA-256 of each in ``found``."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                found[name] = _digest(tensor)
                yield name, tensor


def _digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, row by row."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy()).hexdigest()


# a worker may import the module under two names
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsEngine)
