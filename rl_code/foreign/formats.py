"""The formats of dumps by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.foreign.dump import Format

# A member is a frozen dataclass as ``dump.Format`` has it; others are package.module:object.
FORMATS = {
    "prime_rl": "rl_code.foreign.prime_rl:PrimeRl",
    "trl": "rl_code.foreign.trl:Trl",
    "verifiers": "rl_code.foreign.verifiers:Verifiers",
    "verl": "rl_code.foreign.verl:Verl",
}


def find_format(name: str, settings: Mapping[str, Any]) -> Format:
    """The format of that name. Raises ConfigError."""
    return named.make(FORMATS, Named(name, settings), "--format")
