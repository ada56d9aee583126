"""What a run is configured by: a section for each part of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attention.methods.api import METHODS
from attention.methods.method import Method
from models.families import PRESETS
from models.sharding import MeshConfig
from models.transformer import ModelConfig
from rl_code.derive import settle
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.sandbox.pool import SandboxConfig
from rl_code.environment.tools.api import DEFAULT as DEFAULT_TOOLS
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation.suites import SuiteConfig
from rl_code.learner.advantages import ADVANTAGES
from rl_code.learner.batching import PackConfig
from rl_code.learner.objective import LossConfig
from rl_code.learner.update import OptimizerConfig
from rl_code.metric_writers import WRITERS, WriterSettings
from rl_code.named import Named, find, make
from rl_code.read_config import ConfigError, at_least
from rl_code.rewards.combine import RewardConfig, find_signals
from rl_code.rollout.engine import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.schedule import AsynchronyConfig
from rl_code.step_metrics import METRICS, Metric
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, check_demonstrable
from rl_code.tasks.screening import ScreeningConfig
from rl_code.types import Limits


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that is trained."""

    # A key of models.families.PRESETS, or package.module:object; weights tell their shape without.
    preset: str | None = None
    # A Hugging Face folder, a .gguf file, or a run's workdir, perhaps with @ and a step; "" for
    # random parameters (``rl_code.origin``).
    weights: str = ""
    # Of the weights that are trained.
    dtype: str = "float32"
    # Whether activations are computed again in the backward pass, to save memory.
    remat: bool = False
    # The methods of attention of the first layers, repeated until all layers have one; one name
    # stands for all layers, None for the preset's.
    attention: tuple[Named, ...] | Named | None = None

    def shape(self) -> ModelConfig | None:
        """The preset's shape; None without a preset. Raises ConfigError."""
        return find(PRESETS, self.preset, "config.model.preset") if self.preset else None

    def methods(self) -> tuple[Method, ...] | None:
        """The methods of ``attention`` with their settings, or None. Raises ConfigError."""
        if self.attention is None:
            return None
        path = "config.model.attention"
        if isinstance(self.attention, Named):
            return (make(METHODS, self.attention, path),)
        return tuple(make(METHODS, one, f"{path}[{at}]") for at, one in enumerate(self.attention))


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """The tokeniser: by default the one that belongs to the weights."""

    # "file" reads it; "train" learns byte-level BPE from demonstrations, for random parameters.
    source: Literal["train", "file"] = "file"
    # A tokenizer.json, its folder, or a .gguf file; "" for the one of ``model.weights``.
    path: str = ""
    # "own": the template that came with the tokeniser, or its family's where none did; "family":
    # always the family's; else the path of a jinja2 file.
    chat_template: str = "own"
    # With "train": entries of the vocabulary, and demonstrations that it is learned from.
    vocab_size: int = 512
    texts: int = 2000


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How episodes are sampled."""

    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    # Threads that wait for sandboxes.
    workers: int = 4
    # Seconds after which a tool that does not answer is a fault of ours and ends the run; None for
    # what follows from the limits. Less than they allow would let a model end the run by waiting.
    tool_timeout_s: float | None = None
    # Of the copy of the model that samples; None for that of the model.
    dtype: str | None = None
    # Devices of an actor.
    mesh: MeshConfig = MeshConfig()
    # Whether an actor in the learner's process has devices of its own, after the learner's; else it
    # samples on the learner's.
    apart: bool = False
    # Devices after those that prefill prompts; None to prefill where rows decode.
    prefill_mesh: MeshConfig | None = None

    def __post_init__(self):
        at_least(self, workers=1)


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Warm start on demonstrations."""

    steps: int
    optimizer: OptimizerConfig
    # Distinct ones, gone through again and again; they are cut to ``slots`` tokens.
    demonstrations: int = 60_000
    demonstration: DemonstrationConfig = DemonstrationConfig()
    # Shape of one batch in tokens.
    rows: int = 32
    slots: int = 160
    micro_batches: int = 1
    # Steps between checkpoints.
    checkpoint_every: int = 50

    def __post_init__(self):
        at_least(
            self,
            steps=1,
            demonstrations=1,
            rows=1,
            slots=2,
            micro_batches=1,
            checkpoint_every=1,
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Reinforcement learning."""

    # May be raised on a run that has finished, which then goes on; see also
    # ``OptimizerConfig.total_steps``.
    steps: int
    # Groups of a batch, and episodes of a group.
    tasks_per_step: int
    group_size: int
    optimizer: OptimizerConfig
    # Updates made on each batch.
    epochs: int = 1
    # A member of learner.advantages.ADVANTAGES.
    advantage: Named = Named("grpo")
    loss: LossConfig = LossConfig()
    pack: PackConfig = PackConfig()
    # Parts of a batch whose gradients are computed one after another; None for one row a device.
    micro_batches: int | None = None
    # Trains only on tasks that the policy solves sometimes; None on all.
    screening: ScreeningConfig | None = None

    def __post_init__(self):
        at_least(self, steps=0, tasks_per_step=1, group_size=1, epochs=1, micro_batches=1)
        make(ADVANTAGES, self.advantage, "config.train.advantage")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state is written down."""

    # Steps between checkpoints.
    every: int = 20
    # How many of the newest stay.
    keep: int = 2
    # A metric of a step, as "reward/solved": the checkpoint with its highest value stays too and
    # can be read as "best". None for none.
    best: str | None = None

    def __post_init__(self):
        at_least(self, every=1, keep=1)


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Where the numbers of each step go, and which there are beside the usual ones."""

    # Keys of metric_writers.WRITERS, with their settings. "jsonl" must be among them, since the
    # report and a continued run read its file.
    writers: tuple[Named, ...] = (Named("jsonl"), Named("tensorboard"))
    # Keys of step_metrics.METRICS, or functions of one's own, with their settings.
    extra: tuple[Named, ...] = ()

    def open_settings(self) -> tuple[WriterSettings, ...]:
        """The writers with their settings. Raises ConfigError."""
        if "jsonl" not in [writer.name for writer in self.writers]:
            names = tuple(writer.name for writer in self.writers)
            raise ConfigError(f"config.metrics.writers = {names}: 'jsonl' must be among them")
        return tuple(
            make(WRITERS, named, f"config.metrics.writers.{at}")
            for at, named in enumerate(self.writers)
        )

    def extra_functions(self) -> tuple[Metric, ...]:
        """The extra metrics with their settings. Raises ConfigError."""
        return tuple(
            make(METRICS, named, f"config.metrics.extra.{at}")
            for at, named in enumerate(self.extra)
        )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a run needs. What a file leaves out has its value here, or follows from the rest
    (``derive.settle``), so that a RunConfig is always complete.
    """

    model: ModelSpec
    protocol: Named
    tasks: Named
    limits: Limits
    reward: RewardConfig
    train: TrainConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    # What agents may call, in the order in which prompts declare it.
    tools: tuple[Named, ...] = DEFAULT_TOOLS
    seed: int = 0
    # Devices that learn.
    mesh: MeshConfig = MeshConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    # None to begin with the model as it is.
    sft: SftConfig | None = None
    # Evaluated before and after training.
    suites: tuple[SuiteConfig, ...] = ()
    checkpoint: CheckpointConfig = CheckpointConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self):
        self._check_names()
        for name, section in settle(self).items():
            object.__setattr__(self, name, section)
        self._check_agreement()

    def _check_names(self) -> None:
        self.metrics.open_settings()  # a wrong name is found now, not after the warm start
        self.metrics.extra_functions()
        if not self.model.preset and not self.model.weights:
            raise ConfigError(
                "config.model.preset = None: without config.model.weights a preset has to say the "
                f"model's shape, one of {', '.join(PRESETS)}"
            )
        methods = self.model.methods()
        shape = self.model.shape()
        if methods is not None and shape is not None:
            dataclasses.replace(shape, attention=methods)
        # A wrong name is found now and not in the first episode.
        tools = find_tools(self.tools, "config.tools")
        protocol = find_protocol(self.protocol, tools, "config.protocol")
        if self.sft is not None:
            check_demonstrable(protocol, tools)
        find_signals(self.reward, "config.reward")
        for at, suite in enumerate(self.suites):
            path = f"config.suites[{at}]"
            find_protocol(suite.protocol or self.protocol, tools, f"{path}.protocol")
            endless = find_source(suite.tasks, f"{path}.tasks").endless
            if endless and (suite.shortest or not suite.count):
                raise ValueError(
                    f"suite {suite.name}: shortest=True sorts all tasks and count=0 plays all, and "
                    f"those of {suite.tasks.name!r} are endless"
                )
        names = [suite.name for suite in self.suites]
        if len(set(names)) < len(names):
            raise ValueError(f"suites {names} must have names of their own")

    def _check_agreement(self) -> None:
        """What no section can see alone."""
        train = self.train
        demonstrated = find_source(self.tasks, "config.tasks").demonstrated
        if self.tokenizer.source == "train" and not demonstrated:
            raise ValueError(
                "tokenizer.source='train' trains on demonstrations, which "
                f"tasks.name={self.tasks.name!r} lacks"
            )
        if self.sft is not None and not demonstrated:
            raise ValueError(
                f"sft trains on demonstrations, which tasks.name={self.tasks.name!r} lacks; "
                "leave it out"
            )
        played = [("", self.limits, "rollout.engine", self.rollout.engine)]
        for at, suite in enumerate(self.suites):
            name = f"suites[{at}]."
            shapes = suite.engine or self.rollout.engine
            played.append((name, suite.limits or self.limits, f"{name}engine", shapes))
        for name, limits, engine, shapes in played:
            if self.rollout.tool_timeout_s <= limits.longest_wait_s:
                raise ValueError(
                    f"rollout.tool_timeout_s={self.rollout.tool_timeout_s:g} must be above the "
                    f"{limits.longest_wait_s:g} s that {name}limits lets tools and grading take; a "
                    "model that waits would end the run"
                )
            if limits.tokens > shapes.length:
                raise ValueError(
                    f"{name}limits.tokens={limits.tokens} must not exceed "
                    f"{engine}.length={shapes.length}"
                )
        if train.pack.prompt_slots and train.epochs > 1:
            raise ValueError(
                f"train.pack.prompt_slots={train.pack.prompt_slots} means two phases, whose first "
                f"is good for one update: train.epochs={train.epochs} must be 1"
            )
        if train.pack.drop_uninformative and (train.loss.kl_coef or train.loss.entropy_coef):
            raise ValueError(
                "train.pack.drop_uninformative=True drops groups that "
                f"kl_coef={train.loss.kl_coef} and entropy_coef={train.loss.entropy_coef} would "
                "learn from"
            )
        if train.pack.rows % train.micro_batches:
            raise ValueError(
                f"train.pack.rows={train.pack.rows} must divide into "
                f"train.micro_batches={train.micro_batches}"
            )


def refuse_sync(config: RunConfig) -> None:
    """Raises ConfigError if a learner and actors in processes of their own cannot run a config."""
    if config.asynchrony.mode == "sync":
        raise ConfigError(
            "asynchrony.mode = 'sync': a learner and actors in processes of their own need "
            "'one_step' or 'in_flight'"
        )


def meshes(config: RunConfig, role: str = "all") -> list[MeshConfig]:
    """The devices of a process one after another: those that learn, those that sample, those that
    prefill.
    """
    rollout = config.rollout
    sampling = [rollout.mesh] if role == "actor" or (role == "all" and rollout.apart) else []
    prefill = [rollout.prefill_mesh] if rollout.prefill_mesh and role != "learner" else []
    return [config.mesh] * (role != "actor") + sampling + prefill
