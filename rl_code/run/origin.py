"""Origin of a run's model and tokenizer, and the files of them that the run keeps.

``config.model.weights`` is one of

    ""                        random parameters of the preset's shape
    weights/Qwen2.5-Coder     a Hugging Face folder: config.json, safetensors, tokenizer.json
    weights/model.gguf        a GGUF file, which holds all of that
    runs/first                the newest checkpoint in the workdir of another run
    runs/first@120            that run's checkpoint of step 120
    runs/first@best           that run's checkpoint with the highest score (``checkpoint.best``)

A run writes the folder ``model`` into its workdir. It is like a Hugging Face folder without the
weights. Together with a checkpoint it has all that other runs need to start from it, and all that
``launch.export`` needs to write a complete Hugging Face folder.

A run with adapters (``models.lora``) begins them beside these weights. What starts from the
checkpoint of such a run gets its weights with the adapters merged into them.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention.methods.api import METHODS
from attention.methods.method import Method
from models import families, huggingface_config, json_files, pretrained
from models.adapted import merged, with_adapters
from models.layers import is_of_method, place_name
from models.lora import LoRA, new_adapters, trained
from models.model_config import ModelConfig
from models.padding import cut, cut_config, pad, pad_config
from models.sharding import parameter_shardings
from models.tokenizer import Tokenizer
from models.transformer import Transformer, abstract_model
from rl_code.checkpoint import arrays, checkpoint
from rl_code.checkpoint.record import CheckpointError, Record
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError

# The folder of a workdir that holds the model's config, tokenizer and template.
FOLDER = "model"
# Key of that folder's config.json for methods of attention that Hugging Face has no words for.
ATTENTION = "rl_code_attention"
# Its key for the adapters that the checkpoints hold beside the model.
LORA = "rl_code_lora"

_KEY = "config.model.weights"
# Fields of ModelConfig that weights need not share with a preset. The vocabulary of a model
# that was trained from scratch is as large as its tokenizer.
_NOT_SHAPE = (
    "architecture",
    "dtype",
    "param_dtype",
    "remat",
    "remat_keeps",
    "offload_activations",
    "sequence_parallel",
    "attention",
    "embed_std",
    "vocab_size",
    "lora",
    "quantised",
)


# By dotted names.
Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a model; nothing of it is read before a method is called."""

    # The config's words, for messages.
    weights: str = ""
    # A Hugging Face folder or GGUF file; of a run the folder that it keeps; None without weights.
    files: Path | None = None
    # Workdir with the checkpoints that hold the weights, where they are a run's.
    workdir: Path | None = None
    # The checkpoint to read: its step, or "best"; None for the newest.
    step: int | Literal["best"] | None = None
    # The key that names it, for messages.
    key: str = _KEY

    def shape(self, name: str | None = None, preset: ModelConfig | None = None) -> ModelConfig:
        """The model's shape, with dtypes float32.

        Raises:
          ConfigError: the files cannot be read, or have another shape than the preset called
            ``name``.
        """
        shape = self._read(pretrained.read_config)
        if preset is None:
            return shape
        differing = [
            f"{field.name} = {getattr(preset, field.name)!r} there, "
            f"{getattr(shape, field.name)!r} in the weights"
            for field in dataclasses.fields(ModelConfig)
            if field.name not in _NOT_SHAPE
            and getattr(preset, field.name) != getattr(shape, field.name)
        ]
        if differing:
            raise ConfigError(
                f"config.model.preset = {name!r} is not the model at {self.key} = "
                f"{self.weights!r}: {'; '.join(differing)}. "
                "Leave the preset out: weights tell their shape."
            )
        return shape

    def max_positions(self) -> int | None:
        """The longest context that the model was trained for, where known. Raises ConfigError."""
        return self._read(pretrained.max_positions) if self.files else None

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn by the files of a model. Raises ConfigError."""
        return self._read(pretrained.stop_ids) if self.files else frozenset()

    def _read[T](self, reader: Callable[[Path], T]) -> T:
        """Result of a reader on the files. Raises ConfigError."""
        assert self.files is not None
        try:
            return reader(self.files)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self.key} = {self.weights!r}: {error}") from error

    def tokenizer(self, path: str = "", chat_template: str = "own") -> Tokenizer:
        """The tokenizer of the weights, or the one at ``path``. Raises ConfigError.

        chat_template: ``TokenizerConfig.chat_template``.
        """
        tokenizer = self._read_tokenizer(path)
        key = f"config.tokenizer.chat_template = {chat_template!r}"
        named = dict(tokenizer.named_templates)
        if tokenizer.chat_template is not None:
            named["default"] = tokenizer.chat_template
        names = ", ".join(f"'own:{name}'" for name in named)
        if chat_template == "own":
            if named and "default" not in named:
                raise ConfigError(f"{key}: the tokenizer has no default; choose one of {names}")
            return tokenizer
        tokenizer.named_templates = {}
        own, colon, name = chat_template.partition(":")
        if chat_template == "family":
            tokenizer.chat_template = None
        elif own == "own" and colon:
            if name not in named:
                raise ConfigError(f"{key}: the tokenizer has {names or 'no chat template'}")
            tokenizer.chat_template = named[name]
        else:
            try:
                tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"{key}: neither 'own' nor 'own:NAME' nor 'family' nor a file: {why}"
                ) from error
        return tokenizer

    def _read_tokenizer(self, path: str) -> Tokenizer:
        if not path and self.files is None:
            raise ConfigError(
                "config.tokenizer.path = '': without model.weights there is no tokenizer to take; "
                "name a tokenizer.json, its folder or a .gguf file, or set tokenizer.source='train'"
            )
        place = f"config.tokenizer.path = {path!r}" if path else f"{self.key} = {self.weights!r}"
        try:
            return pretrained.read_tokenizer(Path(path) if path else self.files)
        except (ValueError, OSError) as error:
            hint = "" if path else "; config.tokenizer.path may name another tokenizer"
            raise ConfigError(f"{place}: {error}{hint}") from error

    def check_methods(
        self, methods: Sequence[Method], shape: ModelConfig, change: bool = False
    ) -> None:
        """Raises ConfigError for methods with parameters that the weights do not have.

        shape: that of the weights, with the methods that they were trained with. change:
        ``config.model.change_methods``.
        """
        if self.files is None or change:
            return
        sizes = shape.layer_shape
        known = {name for method in shape.attention for name in method.parameters(sizes)}
        if self.workdir is not None:
            # what a run keeps beside its checkpoints does not say what its methods were
            try:
                arrays_there = checkpoint.record_of(self.workdir, self.step).arrays
            except CheckpointError as error:
                raise ConfigError(f"{self.key} = {self.weights!r}: {error}") from error
            known |= {name.split(".")[-2] for name in arrays_there if name.startswith("model.")}
        for method in methods:
            unknown = sorted(method.parameters(sizes).keys() - known)
            if unknown:
                free = [
                    name
                    for name, kind in METHODS.items()
                    if not kind.needs_documents and not kind().parameters(sizes)
                ]
                raise ConfigError(
                    f"config.model.attention: {type(method).__name__} has parameters of its own "
                    f"({', '.join(unknown)}), which the weights at {self.weights!r} lack; set "
                    "config.model.change_methods=True to begin them, or use "
                    f"{', '.join(free)}, which have none"
                )

    def load(
        self, config: ModelConfig, mesh: Mesh, change: bool = False, seed: int = 0
    ) -> Transformer:
        """The parameters, sharded over ``mesh``. Raises ConfigError, or CheckpointError.

        change: ``config.model.change_methods``. seed: of what it begins at random.
        """
        whole = dataclasses.replace(config, lora=None)
        model = self._load(whole, mesh, change, seed)
        return model if config.lora is None else _begin_adapters(model, config.lora, mesh, seed)

    def _load(self, config: ModelConfig, mesh: Mesh, change: bool, seed: int) -> Transformer:
        """``load`` for a model without adapters."""
        changed = functools.partial(change_methods, mesh, seed) if change else None
        try:
            if self.workdir is not None:
                there = dataclasses.replace(config, lora=kept_adapters(self.files))
                model, _ = load_checkpoint(self.workdir, there, mesh, self.step, changed)
                return model if there.lora is None else merge(model, mesh)
            if changed is None:
                return pretrained.load(self.files, config, mesh)
            # files whose layers have projections of their own have no others
            own = pretrained.read_config(self.files).attention
            own = own if any(method.mixes for method in own) else ModelConfig.attention
            dense = dataclasses.replace(config, attention=own)
            found = arrays.flatten(pretrained.load(self.files, dense, mesh))
            return arrays.rebuild(abstract_model(config), changed(config, found))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self.key} = {self.weights!r}: {error}") from error


def find(weights: str, key: str = _KEY) -> Origin:
    """Find the origin that a config names.

    key: its key there, for messages.

    Raises:
      ConfigError: there is nothing of that name, or what is there holds no model.
    """
    if not weights:
        return Origin()
    path = Path(weights)
    before, at, step = weights.rpartition("@")
    if at and (step.isdecimal() or step == "best") and not path.exists():
        return _of_run(weights, Path(before), "best" if step == "best" else int(step), key)
    if pretrained.is_pretrained(path):
        return Origin(weights, path, key=key)
    if path.is_dir() and any(path.glob("checkpoints")):
        return _of_run(weights, path, None, key)
    if path.is_dir():
        hint = f"; its warm start is {weights}/sft" if checkpoint.steps(path / "sft") else ""
        raise ConfigError(
            f"{key} = {weights!r}: the folder has neither the config.json of a model nor "
            f"checkpoints of a run{hint}"
        )
    hint = "; bash launch/get_smollm2.sh fetches it" if "SmolLM2-135M" in path.name else ""
    raise ConfigError(
        f"{key} = {weights!r} does not exist: looked for at {path.absolute()}{hint}. "
        "It may be a Hugging Face folder, a .gguf file, or the workdir of a run, perhaps with @ "
        "and a checkpoint's step, or @best"
    )


def _of_run(weights: str, workdir: Path, step: int | Literal["best"] | None, key: str) -> Origin:
    found = checkpoint.steps(workdir)
    if not found or (isinstance(step, int) and step not in found):
        raise ConfigError(
            f"{key} = {weights!r}: {workdir} has "
            + (f"checkpoints of steps {found}" if found else "no checkpoint")
        )
    return Origin(weights, kept_by(workdir), workdir, step, key)


def kept_by(workdir: Path) -> Path:
    """The folder in which a run keeps its model's config and tokenizer. Raises ConfigError."""
    # a warm start's checkpoints are in a folder of the workdir
    for folder in (workdir / FOLDER, workdir.parent / FOLDER):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(f"{workdir} is no workdir of a run: it has no {FOLDER}/config.json")


def kept_adapters(folder: Path) -> LoRA | None:
    """The adapters of a run that keeps this folder; None for a run without any.

    Raises ValueError where the folder's config.json is broken.
    """
    content = json_files.read_json(folder / "config.json").get(LORA)
    return None if content is None else LoRA(**content | {"targets": tuple(content["targets"])})


def merge(model: Transformer, mesh: Mesh) -> Transformer:
    """A model sharded over ``mesh`` with its adapters merged (``models.lora.merged``)."""
    plain = dataclasses.replace(model.config, lora=None)
    shardings = parameter_shardings(abstract_model(plain), mesh)
    return jax.jit(merged, out_shardings=shardings)(model)


def _begin_adapters(model: Transformer, lora: LoRA, mesh: Mesh, seed: int) -> Transformer:
    """A model sharded over ``mesh`` with new adapters, which compute nothing yet."""
    abstract = abstract_model(dataclasses.replace(model.config, lora=lora))
    shardings = trained(parameter_shardings(abstract, mesh))
    plain = abstract_model(model.config)
    make = jax.jit(lambda: new_adapters(plain, lora, nnx.Rngs(seed)), out_shardings=shardings)
    return with_adapters(model, lora, make())


def tokenizer_of(workdir: Path) -> Tokenizer:
    """The tokenizer that a run keeps. Raises ConfigError."""
    return Origin(str(workdir), kept_by(workdir)).tokenizer(chat_template="family")


def load_checkpoint(
    workdir: Path,
    config: ModelConfig,
    mesh: Mesh,
    step: int | Literal["best"] | None,
    changed: Callable[[ModelConfig, Arrays], Arrays] | None = None,
) -> tuple[Transformer, int]:
    """The model of a run's checkpoint, sharded over ``mesh``, and the checkpoint's step.

    changed: (a model's shape, the checkpoint's parameters) -> the parameters to take.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
      ValueError: it holds other parameters than a model of ``config``; names them all.
    """
    there = stored_config(checkpoint.record_of(workdir, step), config)
    try:
        shardings = _shardings(there, mesh)
    except ValueError:
        if there == config:
            raise
        # padded for other meshes, so every device has to read all of it first
        whole = NamedSharding(mesh, PartitionSpec())
        shardings = dict.fromkeys(arrays.describe(abstract_model(there)), whole)
    read = checkpoint.load_parameters(workdir, step, shardings)
    if changed is not None:
        read = dataclasses.replace(read, arrays=changed(there, read.arrays))
    abstract = abstract_model(there)
    expected = arrays.describe(abstract)
    found = arrays.describe(read.arrays)
    wrong = [
        f"{name}: expected {expected.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
        for name in expected.keys() | found.keys()
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        raise ValueError(
            f"step {read.step} of {workdir} does not fit the model: {'; '.join(sorted(wrong))}"
        )
    return _padded_as(config, arrays.rebuild(abstract, read.arrays), mesh), read.step


def stored_config(record: Record, config: ModelConfig) -> ModelConfig:
    """The shape of a run's model as its checkpoint has it, which may be padded otherwise than
    ``config``.
    """
    keys = ("model.pad_for", "model.pad_experts_for")
    devices = (read_config.lookup(record.config, key) or 1 for key in keys)
    return pad_config(cut_config(config), *devices)


def _padded_as(config: ModelConfig, model: Transformer, mesh: Mesh) -> Transformer:
    """A model in the padding of ``config``, sharded over ``mesh``."""
    if model.config == config:
        return model
    itself, wanted = abstract_model(cut_config(config)), abstract_model(config)
    convert = jax.jit(
        lambda x: pad(cut(x, itself), wanted), out_shardings=parameter_shardings(wanted, mesh)
    )
    return convert(model)


def change_methods(mesh: Mesh, seed: int, config: ModelConfig, found: Arrays) -> Arrays:
    """The parameters ``found`` for the methods of attention of ``config``.

    Parameters that its methods have and ``found`` lacks begin: those that are ``like`` one of the
    layer's own as a copy of it, the others as in a model with random parameters. Those of other
    methods are left out. Arrays go by their dotted names, and are sharded over ``mesh``.
    """
    shardings = _shardings(config, mesh)
    period = len(config.attention)
    new: dict[str, jax.sharding.Sharding] = {}
    copies: dict[str, tuple[str, int]] = {}  # of which parameter, and from which layer on
    for index, method in enumerate(config.attention):
        for short, parameter in method.parameters(config.layer_shape).items():
            name = f"{place_name(index)}.{short}.value"
            if name not in found:
                new[name] = shardings[name]
                if parameter.like is not None:
                    copies[name] = f"layers.{parameter.like}.value", index

    @functools.partial(jax.jit, out_shardings=new)
    def first_values(found: Arrays) -> Arrays:
        itself = Transformer(cut_config(config), nnx.Rngs(seed))
        random = arrays.flatten(pad(itself, abstract_model(config)))
        copied = {
            name: found[source][index::period].astype(random[name].dtype)
            for name, (source, index) in copies.items()
        }
        return {name: random[name] for name in new} | copied

    kept = {name: x for name, x in found.items() if name in shardings or not is_of_method(name)}
    sources = {source: found[source] for source, _ in copies.values()}
    return kept | first_values(sources)


def _shardings(config: ModelConfig, mesh: Mesh) -> dict[str, jax.sharding.Sharding]:
    """Sharding of each parameter of a model, by its dotted name."""
    abstract = abstract_model(config)
    found = jax.tree.leaves(parameter_shardings(abstract, mesh))
    return dict(zip(arrays.describe(abstract), found, strict=True))


def keep(
    workdir: Path,
    origin: Origin,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    max_positions: int,
    stop_ids: Collection[int],
    chat_template: str | None,
    own_tokenizer: bool = False,
) -> None:
    """Writes the folder ``model`` of a workdir. Where it is there, adds tokens that end a turn to
    it, as in a fork with another protocol.

    config: methods of attention for which Hugging Face has no words are put under a key of our own.
    max_positions: of the run's own episodes; the origin may have been trained for more. stop_ids:
    tokens that end a turn. chat_template: for tokenizers without one. own_tokenizer: whether the
    tokenizer is the origin's, so that the tokens that end a turn there do so here too.
    """
    target = workdir / FOLDER
    if target.exists():
        _add_stops(target, stop_ids)
        return
    # beside the target, so that the last step is a rename
    folder = workdir / f".{FOLDER}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    family = families.of_config(config)
    architecture = family.architecture
    path = folder / "tokenizer.json"
    tokenizer.save(path, chat_template=chat_template, architecture=architecture)
    # What the model was trained to end a turn with, here and before.
    ends = set(stop_ids)
    if own_tokenizer and origin.files is not None:
        ends |= {tokenizer.eos_id} | origin.stop_ids()
    special = {"eos_token_id": sorted(ends), "pad_token_id": tokenizer.pad_id}
    if tokenizer.bos is not None:
        special["bos_token_id"] = tokenizer.token_id(tokenizer.bos)
    longest = max(origin.max_positions() or 0, max_positions)
    told = family.own_methods or huggingface_config.tells_methods(config)
    said = dataclasses.replace(
        config, attention=config.attention if told else ModelConfig.attention, lora=None
    )
    content = huggingface_config.config_to_dict(said, max_positions=longest) | special
    if not told:
        content[ATTENTION] = repr(config.attention)
    if config.lora is not None:
        content[LORA] = dataclasses.asdict(config.lora)
    json_files.write_json(folder / "config.json", content)
    # Not the origin's file: its sampling settings are not those that this run samples with.
    json_files.write_json(folder / huggingface_config.GENERATION_FILE, special)
    folder.rename(target)


def _add_stops(folder: Path, stop_ids: Collection[int]) -> None:
    """Adds tokens that end a turn to the files of a folder that a run keeps.

    Files are replaced and not changed, since a fork shares them with its parent.
    """
    content = json_files.read_json(folder / "config.json")
    known = huggingface_config.stop_ids(content)
    if known.issuperset(stop_ids):
        return
    ends = {"eos_token_id": sorted(known.union(stop_ids))}
    special = huggingface_config.special_ids(content)
    kept = {"config.json": content, huggingface_config.GENERATION_FILE: special}
    for name, before in kept.items():
        draft = folder / f".{name}"
        json_files.write_json(draft, before | ends)
        draft.replace(folder / name)
