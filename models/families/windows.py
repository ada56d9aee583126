"""Sliding windows in a ``config.json``: which layers attend to the last keys only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from attention.methods.dense import Dense
from attention.methods.method import Method
from attention.methods.window import Window
from models.model_config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Windows:
    """Form in which a family's config.json describes windows, which differs between families.

    transformers: ``layer_types`` where it stands, else ``max_window_layers``.
    """

    # ``sliding_window`` where a file leaves it out.
    usual: int = 4096
    # Whether no layer has a window unless ``use_sliding_window`` is true.
    switched: bool = False
    # ``max_window_layers`` where a file leaves it out: layers from that number on have the window.
    # None where all layers have it, and files do not tell them apart.
    first: int | None = None

    def read(self, architecture: str, hf: Mapping[str, Any], layers: int) -> tuple[Method, ...]:
        """The methods of a period of a model with so many layers.

        Raises ValueError naming keys that say no such thing.
        """
        window = hf.get("sliding_window", self.usual)
        if self.switched and not _truth(hf, "use_sliding_window"):
            window = None
        kinds = hf.get("layer_types")
        if self.first is None or not kinds:
            own = self._without_kinds(architecture, hf, window, layers)
            if kinds and kinds != own:
                raise ValueError(
                    f"config.json has layer_types={kinds!r}, which {architecture} does not read: "
                    f"all its layers are {own[0]!r}"
                )
            kinds = own
        check_kinds(kinds, (FULL, SLIDING), layers)
        if SLIDING not in kinds:
            return (Dense(),)
        if type(window) is not int or window < 1:
            raise ValueError(
                f"config.json has layer_types with {SLIDING!r} and sliding_window={window!r}"
                + (" by use_sliding_window" if self.switched else "")
                + "; it must be a whole number from 1 on"
            )
        return tuple(Window(window) if kind == SLIDING else Dense() for kind in period_of(kinds))

    def _without_kinds(
        self, architecture: str, hf: Mapping[str, Any], window: Any, layers: int
    ) -> list[str]:
        """The kind of each layer where ``layer_types`` does not say it."""
        if window is None:
            return [FULL] * layers
        if self.first is None:
            return [SLIDING] * layers
        first = hf.get("max_window_layers", self.first)
        if type(first) is not int or first < 0:
            raise ValueError(
                f"config.json has sliding_window={window!r}, which in {architecture} the layers "
                f"from max_window_layers={first!r} on have; that must be a whole number"
            )
        return [SLIDING if layer >= first else FULL for layer in range(layers)]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The part of a config.json that tells the methods.

        Raises ValueError for methods that it cannot tell.
        """
        windows = {method for method in config.attention if isinstance(method, Window)}
        others = set(config.attention) - windows
        mixed = bool(windows) and bool(others)
        if len(windows) > 1 or not others <= {Dense()} or (mixed and self.first is None):
            raise ValueError(
                f"config.json of this family has no words for attention={config.attention}, only "
                f"for one size of windows"
                + (", in all layers or none" if self.first is None else f", and {Dense()}")
            )
        if not windows:
            return {} if self.switched else {"sliding_window": None}
        written: dict[str, Any] = {"sliding_window": windows.pop().window}
        if self.switched:
            written["use_sliding_window"] = True
        if self.first is not None:
            kinds = [FULL if method == Dense() else SLIDING for method in config.attention]
            written["layer_types"] = kinds * config.periods
            # for readers that know no layer_types
            written["max_window_layers"] = kinds.index(SLIDING)
        return written


def check_kinds(kinds: Any, known: Sequence[str], layers: int) -> None:
    """Raises ValueError unless ``layer_types`` names known kinds, once for each layer."""
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(kind in known for kind in kinds)
    ):
        raise ValueError(
            f"config.json has layer_types={kinds!r}; only {' and '.join(map(repr, known))} "
            f"{'is' if len(known) == 1 else 'are'} supported, once for each of "
            f"num_hidden_layers={layers!r}"
        )


def period_of(kinds: list[str]) -> list[str]:
    """The shortest beginning that repeats over all layers."""
    count = len(kinds)
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    return kinds[: next(size for size in divisors if kinds == kinds[:size] * (count // size))]


def only_full(hf: Mapping[str, Any], layers: int) -> None:
    """Raises ValueError for layers of a family without windows that are no full attention."""
    if hf.get("layer_types") not in (None, []):
        check_kinds(hf["layer_types"], (FULL,), layers)


def _truth(hf: Mapping[str, Any], key: str) -> bool:
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json has {key}={value!r}; it must be true or false")
    return bool(value)
