"""Choice of the implementation of a kernel: the named one, or the one that suits the backend and
the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

REFERENCE = "reference"
# The compute capability of GPUs by a part of their names, where the process has no GPU to ask.
_CAPABILITIES = {"B200": "10.0", "H100": "9.0", "H200": "9.0"}


def choose(
    implementation: str | None,
    names: Sequence[str],
    obstacle: Callable[[str], str | None],
    interpret: Any,
) -> str:
    """The implementation to run.

    implementation: the name that the caller asks for, or None for the first of ``names`` that can
      run, or "reference" if none can.
    names: the kernels.
    obstacle: a function from a name to why that kernel cannot run the input here, or None.
    interpret: what the caller gave as ``interpret``; it needs a named implementation.

    Raises ValueError for a name that is not known or cannot run, and for an interpreter without a
    name.
    """
    if implementation is None:
        if interpret:
            raise ValueError(f"{interpret=} needs a named implementation, not {implementation=}")
        return next((name for name in names if not obstacle(name)), REFERENCE)
    if implementation not in (*names, REFERENCE):
        raise ValueError(f"{implementation=} must be one of {[*names, REFERENCE]} or None")
    if implementation != REFERENCE and (found := obstacle(implementation)):
        raise ValueError(f"{implementation=} cannot run this: {found}")
    return implementation


def device(implementation: str) -> str:
    """The name that heuristics have for the device at hand: "tpu", "hopper" or "blackwell"."""
    if implementation == "tpu":
        return "tpu"
    return "blackwell" if _capability().startswith("10.") else "hopper"


def here() -> str:
    """The platform that programs are traced for: "cpu", "tpu", "hopper" or "blackwell".

    For any other GPU it is "gpu" and its compute capability, as "gpu 8.0". It is the platform of
    the mesh that is set (``jax.set_mesh``), whose devices need not be here, or that of the process.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    backend = jax.default_backend() if device is None else device.platform
    if backend not in ("gpu", "cuda"):
        return backend
    major = _capability().split(".")[0]
    return {"9": "hopper", "10": "blackwell"}.get(major, f"gpu {_capability()}")


def backend_obstacle(
    implementation: str, arrays: Iterable[jax.Array], dtypes: Sequence[str], interpret: Any
) -> str | None:
    """Reason why a kernel for these dtypes cannot run here, or None."""
    if not interpret and (found := platform_obstacle(implementation, here())):
        return f"{found}, and {interpret=}"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        return (
            f"a mesh of {mesh.size} devices is set, across which a kernel is not cut: call it "
            "within jax.shard_map"
        )
    return dtype_obstacle({str(x.dtype) for x in arrays}, dtypes)


def platform_obstacle(implementation: str, platform: str) -> str | None:
    """Reason why a kernel is not for a platform (see ``here``), or None."""
    if platform.startswith("gpu ") and implementation == "gpu":
        capability = platform.removeprefix("gpu ")
        return f"compute {capability=} is neither Hopper's 9.0 nor Blackwell's 10.0"
    backend = "gpu" if platform in ("hopper", "blackwell") else platform
    return None if backend == implementation else f"{backend=} is not {implementation!r}"


def dtype_obstacle(found: set[str], dtypes: Sequence[str]) -> str | None:
    """Reason why a kernel for ``dtypes`` cannot run arrays of the dtypes ``found``, or None."""
    if len(found) > 1 or not found <= set(dtypes):
        return f"the dtypes {sorted(found)} must be one of {tuple(dtypes)}"
    return None


def _capability() -> str:
    """Compute capability of the GPU at hand, or of the one that the mesh names.

    Hopper's if there is none, for the interpreter.
    """
    found = getattr(jax.devices()[0], "compute_capability", None)
    if found is not None:
        return found
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = "" if device is None else device.device_kind.upper()
    return next((given for part, given in _CAPABILITIES.items() if part in name), "9.0")
