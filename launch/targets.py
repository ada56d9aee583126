"""Accelerators that programs are compiled for without having them: their peak rates and what the
compilers ask.
"""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

from jax.sharding import AbstractDevice

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
    """A device. flops: dense bfloat16 operations per second; bandwidth: bytes of HBM per second;
    gpu: XLA's numbers.
    """

    name: str
    flops: float
    bandwidth: float
    tpu_topology: str | None = None
    gpu: dict[str, float] | None = None

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
        """Of the process that compiles: no device is looked for."""
        if self.tpu_topology:
            return {
                "JAX_PLATFORMS": "cpu",
                "TPU_SKIP_MDS_QUERY": "1",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            }
        report = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
        return {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"} | report

    def topology(self, slices: str = "1x1x1") -> dict[str, Any]:
        """Arguments of ``topologies.get_topology_desc``; slices: slices x hosts x GPUs."""
        if self.tpu_topology:
            return {"platform": "tpu", "topology_name": self.tpu_topology}
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

# Peak rates are the makers'.
TARGETS = {
    target.name: target
    for target in (
        Target("v5e", 197e12, 819e9, tpu_topology="v5e:2x2"),
        Target("v5p", 459e12, 2765e9, tpu_topology="v5p:2x2x1"),
        Target("v6e", 918e12, 1640e9, tpu_topology="v6e:2x2"),
        Target("h100", 989e12, 3352e9, gpu=_H100),
        Target("h200", 989e12, 4800e9, gpu=_H200),
        Target("gb200", 2500e12, 7928e9, gpu=_GB200),
    )
}
