"""Statements of a model family about itself; the shared readers and writers ask it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attention.methods.dsa import DSA
from attention.methods.mla import MLA
from attention.methods.sinks import Sinks
from models.families.hybrid import Regrouped
from models.families.parameters import Parameter
from models.families.windows import Windows
from models.model_config import ModelConfig, MoE

# How a family writes a tool call. "json": ``<tool_call>`` blocks that hold ``{"name": ...,
# "arguments": {...}}`` (Hermes). "tags": blocks that hold ``<function=name><parameter=key>value
# </parameter></function>``. "bare": ``{"name": ..., "parameters": {...}}`` as the whole message.
# "pairs": blocks of the name and then ``<arg_key>key</arg_key><arg_value>value</arg_value>``.
CallFormat = Literal["json", "tags", "pairs", "bare"]

# Keys of config.json that change what a model computes, with the values under which they change
# nothing. Any other value is refused.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
}


# Fields of MoE that change no output, and that no file has.
_NOT_IN_FILES = ("balance_loss", "balance_rate", "buffer", "fold", "slots")


@dataclasses.dataclass(frozen=True)
class Experts:
    """Form in which a family's config.json describes its experts."""

    # Field of MoE -> key of config.json that holds it.
    keys: Mapping[str, str]
    # Fields of MoE whose values follow from the architecture.
    options: Mapping[str, Any]
    # Key -> the name that it has in some files.
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Key that holds the size of the shared experts together; None where ``keys`` has their number.
    shared_size: str | None = None
    # Whether files may hold the matrices of all experts of a layer in one tensor.
    fused: bool = False

    def describes(self, moe: MoE) -> bool:
        """True if config.json can say all that is special about these experts."""
        rest = {
            f.name: f.default
            for f in dataclasses.fields(moe)
            if f.name not in self.keys and f.name not in _NOT_IN_FILES
        }
        if self.shared_size:
            del rest["shared"]
        return all(getattr(moe, name) == value for name, value in (rest | self.options).items())

    def read(self, hf: Mapping[str, Any], need: Callable[[str], Any]) -> MoE:
        """The experts of the config.json ``hf``. need: the value of a key of it, or ValueError."""
        found = {}
        for name, key in self.keys.items():
            alias = self.aliases.get(key)
            found[name] = hf[alias] if key not in hf and alias in hf else need(key)
        # some files say null for no shared expert
        found = {name: 0 if value is None else value for name, value in found.items()}
        if self.shared_size:
            shared, size = need(self.shared_size), found["mlp_dim"]
            if not isinstance(shared, int) or not isinstance(size, int) or shared % size:
                raise ValueError(
                    f"config.json has {self.shared_size}={shared!r}, which must be a multiple of "
                    f"{self.keys['mlp_dim']}={size!r}"
                )
            found["shared"] = shared // size
        return MoE(**found, **self.options)

    def write(self, moe: MoE) -> dict[str, Any]:
        """Their part of a config.json."""
        shared = {self.shared_size: moe.shared * moe.mlp_dim} if self.shared_size else {}
        return {key: getattr(moe, name) for name, key in self.keys.items()} | shared


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models: its shapes, the names of its weights elsewhere, and how it talks."""

    # Published models by name; dtypes and rematerialisation are the caller's to replace.
    presets: Mapping[str, ModelConfig]
    # ``model_type`` in config.json and ``general.architecture`` in GGUF files.
    architecture: str
    # The class that ``architectures`` names in config.json.
    huggingface_class: str
    # Fields of ModelConfig whose values follow from the architecture.
    options: Mapping[str, Any]
    # Path of a parameter in the model -> its names and axes elsewhere, in the order of writing.
    parameters: Mapping[str, Parameter]
    # Chat template (jinja2) for tokenizers that bring none of their own.
    template: str
    # Special tokens that end a message of the assistant; the first ends every turn.
    ends: tuple[str, ...]
    # Name of the protocol in which an episode talks to the model. One that no other family has
    # needs no entry elsewhere: ``rl_code.environment.protocols.api`` makes it.
    protocol: str
    # Whether ``ends`` are the marks of who speaks next: templates write them with the next message,
    # the first of them before results of tools.
    ends_open: bool = False
    # How tool calls are written; None where the model was not trained to write any.
    call_format: CallFormat | None = None
    # Calls that one assistant message may hold when they are given as ``tool_calls``; with 0 they
    # are written into the content.
    max_calls: float = 0
    # Whether the template has a place for the schemas of tools.
    declares_tools: bool = False
    # Whether GGUF files keep the rows of q and k in the order of interleaved RoPE pairs.
    interleaved_in_gguf: bool = False
    # How config.json describes experts; None for a family without any.
    experts: Experts | None = None
    # Keys of config.json and the only values of them that this model computes.
    harmless: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=lambda: HARMLESS)

    # Keys of config.json that are true or false, and the fields of ModelConfig that they set; false
    # where they are left out.
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # How config.json describes sliding windows; None for an architecture without any.
    windows: Windows | None = None
    # Further keys that files of ours have.
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Whether layers that keep a state stand among the others (``hybrid``).
    states: bool = False
    # Whether all layers have latent attention (``latent``).
    latent: bool = False
    # Whether all layers have attention sinks (``gpt_oss``).
    sinks: bool = False
    # Files' tensors, and those of the model whose last axes alternate in them; "{}" for the layer.
    alternating: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Whether indexers of such layers rotate elements 2 i and 2 i + 1 together, and not i and i +
    # half; None for layers without indexers.
    index_interleaved: bool | None = None
    # Whether files may have layers behind the last one, which guess further tokens and are not
    # read.
    guesses: bool = False
    # The share of each head that RoPE rotates where config.json does not say it.
    partial_rotary: float = 1.0
    # (``model_type``, class) of folders whose config.json has that of the text model under
    # ``text_config``; None for none.
    nested: tuple[str, str] | None = None
    # How names begin in such folders, where those of others begin with "model.".
    prefix: str | None = None
    # Beginnings of the names of tensors that are not read; "{layers}" stands for the number of
    # layers.
    skipped: tuple[str, ...] = ()
    # Tensors that files group in another way.
    regrouped: tuple[Regrouped, ...] = ()

    @property
    def own_methods(self) -> bool:
        """True if files have words for layers whose methods have parameters of their own."""
        return self.states or self.latent or self.sinks

    @property
    def end(self) -> str:
        """The token that ends a turn."""
        return self.ends[0]

    def check(self, hf: Mapping[str, Any]) -> None:
        """Raises ValueError naming a key of the config.json ``hf`` whose value this family does not
        compute.
        """
        for key, harmless in self.harmless.items():
            if key in hf and hf[key] not in harmless and not self._reads(key):
                raise ValueError(
                    f"config.json has {key}={hf[key]!r}, which is not supported, only "
                    f"{harmless[0]!r}"
                )
        for key in self.switches:
            if not isinstance(hf.get(key), bool | None):
                raise ValueError(f"config.json has {key}={hf[key]!r}, which must be true or false")

    def _reads(self, key: str) -> bool:
        """True if config.json may give a key other values than harmless ones."""
        if key == "use_sliding_window":
            return self.windows is not None and self.windows.switched
        if key == "partial_rotary_factor":
            return self.partial_rotary != 1
        return key in self.switches

    def read_switches(self, hf: Mapping[str, Any]) -> dict[str, bool]:
        """The fields of ModelConfig that switches of the config.json ``hf`` set."""
        return {
            field: bool(hf.get(key)) for key, fields in self.switches.items() for field in fields
        }

    def write_switches(self, config: ModelConfig) -> dict[str, bool]:
        """Their part of a config.json."""
        return {key: getattr(config, fields[0]) for key, fields in self.switches.items()}

    def describes(self, config: ModelConfig) -> bool:
        """True if a model of this shape is of this architecture."""
        if (config.moe is None) != (self.experts is None):
            return False
        if config.moe is not None and not self.experts.describes(config.moe):
            return False
        if self.states and not any(method.mixes for method in config.attention):
            return False
        kind = MLA if self.index_interleaved is None else DSA
        if self.latent and any(type(method) is not kind for method in config.attention):
            return False
        layers = [method for method in config.attention if isinstance(method, DSA)]
        if self.latent and {m.index_interleaved for m in layers} - {self.index_interleaved}:
            return False
        if self.sinks and not all(isinstance(method, Sinks) for method in config.attention):
            return False
        if config.partial_rotary != 1 and self.partial_rotary == 1:
            return False
        for fields in self.switches.values():
            if len({getattr(config, name) for name in fields}) > 1:
                return False
        free = [name for fields in self.switches.values() for name in fields]
        fixed = {"o_bias": False, **self.options}
        return all(
            getattr(config, name) == value for name, value in fixed.items() if name not in free
        )
