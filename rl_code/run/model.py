"""The tokenizer and the model's shape of a run: those of its weights, or of its config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh

from attention.methods.method import Method
from models import families, peft
from models.lora import with_trained
from models.marks import unquote
from models.model_config import ModelConfig, MoE
from models.own_template import TemplateSettings
from models.padding import pad_config
from models.rope_scaling import DynamicScaling
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.summaries import longest_context
from rl_code.environment.tools.api import find_tools
from rl_code.run import lineage
from rl_code.run import origin as origin_lib
from rl_code.run.agreement import check_chooses, check_states
from rl_code.run.config import RunConfig
from rl_code.run.origin import Origin
from rl_code.run.sections import LoraConfig, TokenizerConfig
from rl_code.tasks.demonstrations import Segment


def find_tokenizer(
    config: RunConfig,
    origin: Origin,
    workdir: Path,
    demonstration: Callable[[int], Sequence[Segment]],
) -> Tokenizer:
    """The tokenizer of a run: from a file, from where its weights come from, or a new one.

    demonstration: the n-th demonstration of the run, for a tokenizer that is trained on their
    texts. Raises ConfigError.
    """
    spec = config.tokenizer
    # a run that trained its tokenizer hands it on with its weights
    if spec.source == "file" or origin.workdir is not None:
        tokenizer = origin.tokenizer(spec.path, spec.chat_template)
        tokenizer.template_settings = _template_settings(spec)
        return tokenizer
    if origin.files is not None:
        raise ConfigError(
            f"config.tokenizer.source = 'train': the weights at {origin.weights!r} have a "
            "tokenizer; leave the section out"
        )
    if lineage.read(workdir):
        # The tokenizer was trained before the fork, perhaps on other tasks or with another seed.
        # The run keeps it, with the template of its family.
        return origin_lib.tokenizer_of(workdir)
    texts = (
        unquote("".join(segment.text for segment in demonstration(i))) for i in range(spec.texts)
    )
    protocol = find_protocol(config.protocol, find_tools(config.tools), "config.protocol")
    special = protocol.SPECIAL_TOKENS or Compact.SPECIAL_TOKENS
    return Tokenizer.train(texts, spec.vocab_size, special, eos="<|eot|>", pad="<|pad|>")


def _template_settings(spec: TokenizerConfig) -> TemplateSettings:
    """Settings that the chat template is rendered with. Raises ConfigError."""
    try:
        return TemplateSettings(spec.template_arguments, spec.template_date)
    except ValueError as error:
        raise ConfigError(f"config.tokenizer.template_{error}") from error


def find_model_config(config: RunConfig, origin: Origin, tokenizer: Tokenizer) -> ModelConfig:
    """The shape of a run's model, with its methods of attention. Raises ConfigError."""
    spec = config.model
    shape = spec.shape()
    if origin.files is not None:
        shape = origin.shape(spec.preset, shape)
        _check_positions(config, origin, shape)
    if origin.files is None and config.tokenizer.source == "train":
        shape = dataclasses.replace(shape, vocab_size=tokenizer.vocab_size)
    elif tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"config.tokenizer.path = {config.tokenizer.path!r}: the tokenizer has "
            f"{tokenizer.vocab_size} tokens, the model only {shape.vocab_size}"
        )
    methods = spec.methods() or shape.attention
    origin.check_methods(methods, shape, spec.change_methods)
    check_chooses(methods, shape.moe, config.rollout.picks)
    check_states(config, methods)
    moe = _balanced(config, shape.moe)
    methods = _indexed(config, methods)
    shape = dataclasses.replace(
        shape,
        architecture=families.of_config(shape).architecture,
        attention=methods,
        dtype=spec.dtype,
        remat=spec.remat,
        remat_keeps=spec.remat_keeps,
        offload_activations=spec.offload_activations,
        sequence_parallel=spec.sequence_parallel,
        moe=moe,
    )
    if spec.lora is not None:
        shape = _adapted(shape, spec.lora)
    return _padded(config, shape)


def _check_positions(config: RunConfig, origin: Origin, shape: ModelConfig) -> None:
    """Raises ConfigError for episodes longer than the contexts that weights were trained for."""
    most = origin.max_positions()
    stretched = isinstance(shape.rope_scaling, DynamicScaling)
    if most is None or (config.model.longer_context and not stretched):
        return
    instead = "lower the limit" + (
        "; its RoPE is stretched by the length of each context (rope_type 'dynamic'), which is not "
        "supported"
        if stretched
        else ", or set model.longer_context=True to train it for longer ones"
    )
    # outside of documents positions count from the longest document
    before = config.documents.longest if config.documents else 0
    played = {"config.": config.limits}
    for at, suite in enumerate(config.suites):
        if suite.limits is not None:
            played[f"config.suites[{at}]."] = suite.limits
    for name, limits in played.items():
        longest = longest_context(config.summaries, limits)
        if longest + before > most:
            behind = f" behind documents.longest = {before}" if before else ""
            if longest < limits.tokens:
                behind = f" in contexts of summaries.context = {longest}{behind}"
            raise ConfigError(
                f"{name}limits.tokens = {limits.tokens}{behind}: the model at {origin.weights!r} "
                f"was trained for contexts of {most} tokens; {instead}"
            )


def _adapted(config: ModelConfig, spec: LoraConfig) -> ModelConfig:
    """The shape with the adapters that are trained. Raises ConfigError."""
    key = "config.model.lora"
    try:
        config = dataclasses.replace(config, lora=spec.adapters())
        if spec.weights:
            key = f"{key}.weights = {spec.weights!r}"
            peft.check(spec.weights, config)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error
    return config


def _padded(config: RunConfig, shape: ModelConfig) -> ModelConfig:
    """The shape that divides by the devices it was said to be for. Raises ConfigError."""
    devices = config.model.pad_for or 1
    expert_devices = config.model.pad_experts_for or 1
    found = pad_config(shape, devices, expert_devices)
    if found is shape:
        return shape
    if shape.lora is not None:
        name = "pad_for" if devices > 1 else "pad_experts_for"
        raise ConfigError(
            f"config.model.{name} = {getattr(config.model, name)}: adapters (config.model.lora) "
            "are not padded; leave one of the two out"
        )
    # each expert's matrix stays what it is
    if pad_config(shape, devices) is shape:
        return found
    for section, optimizer in config.optimizers().items():
        if optimizer.muon_learning_rate is not None:
            raise ConfigError(
                f"config.{section}.optimizer.muon_learning_rate = {optimizer.muon_learning_rate}: "
                f"Muon looks at whole matrices, which model.pad_for={devices} changes; use AdamW "
                "alone (None)"
            )
    return found


def _balanced(config: RunConfig, moe: MoE | None) -> MoE | None:
    """The experts as they are trained. Raises ConfigError."""
    spec = config.model
    balance = dict(balance_loss=spec.balance_loss, balance_rate=spec.balance_rate)
    if moe is None:
        if any(balance.values()):
            raise ConfigError(
                f"config.model has {balance}, and the model has no experts; leave both at 0"
            )
        for name in ("fold_experts", "pad_experts_for"):
            if getattr(spec, name):
                raise ConfigError(
                    f"config.model.{name} = {getattr(spec, name)}: the model has no experts; leave "
                    "it out"
                )
        return None
    if slots := config.train.pack.prompt_slots:
        raise ConfigError(
            f"config.train.pack.prompt_slots = {slots}: an update in two phases does not count "
            "the experts of prompts; set it to 0 for a model with experts"
        )
    try:
        return dataclasses.replace(
            moe, **balance, fold=spec.fold_experts, buffer=spec.expert_buffer
        )
    except ValueError as error:
        raise ConfigError(f"config.model: {error}") from error


def _indexed(config: RunConfig, methods: tuple[Method, ...]) -> tuple[Method, ...]:
    """The methods of a period with their indexers as they are trained. Raises ConfigError."""
    spec = config.model
    given = dict(index_loss=spec.index_loss, all_keys=spec.index_all_keys)
    given = {name: value for name, value in given.items() if value}
    if not given:
        return methods
    if not any(method.indexes for method in methods):
        raise ConfigError(
            f"config.model.index_loss = {spec.index_loss} and index_all_keys = "
            f"{spec.index_all_keys}: no layer of the model has an indexer, as dsa has; leave both "
            "out"
        )
    if spec.index_all_keys and config.rollout.picks is not None:
        raise ConfigError(
            f"config.rollout.picks = {config.rollout.picks!r}: with model.index_all_keys=True no "
            "keys are chosen; set rollout.picks to None"
        )
    try:
        return tuple(
            dataclasses.replace(method, **given) if method.indexes else method for method in methods
        )
    except ValueError as error:
        raise ConfigError(f"config.model: {error}") from error


def with_given_adapters(config: RunConfig, model: Transformer, mesh: Mesh) -> Transformer:
    """The model with the adapters that ``model.lora.weights`` names, sharded over ``mesh``; as it
    is where that names none.
    """
    lora = config.model.lora
    if lora is None or not lora.weights:
        return model
    return with_trained(model, peft.load(lora.weights, model.config, mesh))
