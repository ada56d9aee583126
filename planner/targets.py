"""Accelerators that programs are compiled for without having them: their peak rates and what the
compilers ask.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import shutil
from typing import Any

from jax.sharding import AbstractDevice

# What installs the compilers.
INSTALL = "pip install -e .[aot]"

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  core_count: {cores} memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability} minor: 0 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 15 }} device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A device."""

    name: str
    # Dense bfloat16 operations per second.
    flops: float
    # Bytes of HBM per second.
    bandwidth: float
    # Bytes of HBM.
    memory: float
    # Bytes per second that a device sends to others of its domain (NVLink, ICI), and how many
    # devices a domain has.
    link: float
    domain: int
    # Bytes per second that it sends to other domains.
    network: float
    # The smallest slice of TPUs that is compiled for.
    tpu_topology: str | None = None
    # XLA's numbers for a GPU.
    gpu: dict[str, float] | None = None
    # GPUs of one host.
    host: int = 8
    # Slices of TPUs by how many they have.
    slices: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def platform(self) -> str:
        """As JAX names it."""
        return "tpu" if self.tpu_topology else "cuda"

    @property
    def kind(self) -> str:
        """As the kernels' heuristics name it."""
        return (
            "tpu" if self.tpu_topology else {9: "hopper", 10: "blackwell"}[self.gpu["capability"]]
        )

    @property
    def device(self) -> AbstractDevice:
        """A device of a mesh that programs are traced for."""
        platform = {"cuda": "gpu"}.get(self.platform, self.platform)
        kind = f"TPU {self.name}" if self.tpu_topology else f"NVIDIA {self.name.upper()}"
        return AbstractDevice(device_kind=kind, num_cores=None, platform=platform)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that compile for it."""
        if self.tpu_topology:
            return ("libtpu",)
        assembler = () if shutil.which("ptxas") else ("nvidia-cuda-nvcc",)
        return ("jax-cuda13-plugin", "jax-cuda13-pjrt", *assembler)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the process that compiles: no device is looked for."""
        if self.tpu_topology:
            return {
                "JAX_PLATFORMS": "cpu",
                "TPU_SKIP_MDS_QUERY": "1",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            }
        report = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
        return {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"} | report

    def topology(self, devices: int | None = None) -> dict[str, Any]:
        """Arguments of ``topologies.get_topology_desc``.

        devices: how many; None for the smallest slice of TPUs, or one GPU. Raises ValueError where
        no slice of TPUs has so many.
        """
        if self.tpu_topology:
            if devices is not None and devices not in self.slices:
                known = ", ".join(map(str, self.slices))
                raise ValueError(f"slices of {self.name} have {known} devices, not {devices}")
            name = self.tpu_topology if devices is None else f"{self.name}:{self.slices[devices]}"
            return {"platform": "tpu", "topology_name": name}
        count = devices or 1
        gpus = math.gcd(count, self.host)
        slices = f"1x{count // gpus}x{gpus}"  # slices x hosts x GPUs
        text = _GPU.format(name=self.name, **self.gpu)
        return {
            "platform": "cuda",
            "topology_name": slices,
            "topology": slices,
            "target_config": text,
        }


_HOPPER = {"cores": 132, "cache": 52428800, "clock": 1.98, "capability": 9}
_H100 = _HOPPER | {"bandwidth": 3352320000000, "memory": 84942979072}
_H200 = _HOPPER | {"bandwidth": 4800000000000, "memory": 151397597184}
_GB200 = {
    "cores": 152,
    "bandwidth": 7928064000000,
    "cache": 135528448,
    "clock": 2.062,
    "memory": 197897748480,
    "capability": 10,
}

# Rates and sizes are the makers' (data sheets of H100 SXM, H200 and GB200 NVL72, without sparsity;
# Google Cloud's pages on TPU v5e, v5p and v6e), none of them measured. They are peaks: nowhere is
# an efficiency taken off, so what follows from them are bounds. NVLink and ICI: in one direction,
# all links of a device together (NVLink 4: 18 of 25 GB/s, NVLink 5: 18 of 50). Network: an adapter
# of 400 Gbit/s for each GPU (DGX H100 has 8 ConnectX-7, a tray of GB200 NVL72 one for each of its
# 4), in one direction. TPUs of one slice do not use it: 25 and 50 Gbit/s of a chip are its part of
# a host's adapter, from memory, without a page to cite.
_GBIT = 1e9 / 8
_NVLINK4 = {"link": 450e9, "domain": 8, "network": 400 * _GBIT}
_NVL72 = {"link": 900e9, "domain": 72, "network": 400 * _GBIT, "host": 4}
_V5E = {"link": 1600 * _GBIT, "domain": 256, "network": 25 * _GBIT}
_V5P = {"link": 4800 * _GBIT, "domain": 8960, "network": 50 * _GBIT}
_V6E = {"link": 3584 * _GBIT, "domain": 256, "network": 50 * _GBIT}
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 72: "4x6x3", 128: "4x4x8"}

TARGETS = {
    target.name: target
    for target in (
        Target("v5e", 197e12, 819e9, 16e9, tpu_topology="v5e:2x2", slices=_FLAT, **_V5E),
        Target("v5p", 459e12, 2765e9, 95e9, tpu_topology="v5p:2x2x1", slices=_CUBE, **_V5P),
        Target("v6e", 918e12, 1640e9, 32e9, tpu_topology="v6e:2x2", slices=_FLAT, **_V6E),
        Target("h100", 989e12, 3352e9, 85e9, gpu=_H100, **_NVLINK4),
        Target("h200", 989e12, 4800e9, 151e9, gpu=_H200, **_NVLINK4),
        Target("gb200", 2500e12, 7928e9, 198e9, gpu=_GB200, **_NVL72),
    )
}


def is_installed(package: str) -> bool:
    """True if a package of Python is installed."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False
