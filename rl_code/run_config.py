"""What a run is configured by: a section for each part of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attention.methods import METHODS, Method
from models.families import PRESETS
from models.sharding import MeshConfig
from models.transformer import ModelConfig
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.sandbox.pool import SandboxConfig
from rl_code.environment.tools.api import DEFAULT as DEFAULT_TOOLS
from rl_code.environment.tools.api import find_tools
from rl_code.learner.advantages import ADVANTAGES
from rl_code.learner.batching import PackConfig
from rl_code.learner.losses import LossConfig
from rl_code.learner.update import OptimizerConfig
from rl_code.metric_writers import WRITERS, WriterSettings
from rl_code.named import Named, find, make
from rl_code.read_config import ConfigError
from rl_code.rewards.combine import RewardConfig, find_signals
from rl_code.rollout.engine import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.schedule import AsynchronyConfig
from rl_code.step_metrics import METRICS, Metric
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig
from rl_code.tasks.screening import ScreeningConfig
from rl_code.types import Limits


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that is trained."""

    dtype: str
    remat: bool
    # A key of models.families.PRESETS, or package.module:object; weights tell their shape without.
    preset: str | None = None
    # A Hugging Face folder, a .gguf file, or a run's workdir, perhaps with @ and a step; "" for
    # random parameters (``rl_code.origin``).
    weights: str = ""
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
        period = self.attention if isinstance(self.attention, tuple) else (self.attention,)
        path = "config.model.attention"
        return tuple(make(METHODS, named, f"{path}.{at}") for at, named in enumerate(period))


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """The tokeniser: by default the one that belongs to the weights."""

    # "file" reads it; "train" learns byte-level BPE from demonstrations, for random parameters.
    source: Literal["train", "file"] = "file"
    # A tokenizer.json, its folder, or a .gguf file; "" for the one of ``model.weights``.
    path: str = ""
    # With "train": entries of the vocabulary, and demonstrations that it is learned from.
    vocab_size: int = 512
    texts: int = 2000


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """workers: threads that wait for sandboxes. tool_timeout_s: see Scheduler. dtype: of the
    sampling copy.

    mesh: devices of an actor. apart: whether an actor in the learner's process has devices of its
    own, after the learner's; else it samples on the learner's. prefill_mesh: devices after those
    that prefill prompts; None to prefill where rows decode.
    """

    engine: EngineConfig
    sampling: SamplingConfig
    workers: int
    tool_timeout_s: float
    dtype: str
    mesh: MeshConfig
    apart: bool
    prefill_mesh: MeshConfig | None = None


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Warm start on demonstrations; steps 0 skips it.

    demonstrations: distinct ones, gone through again and again; they are cut to ``slots`` tokens.
    rows x slots: tokens of one batch. checkpoint_every: steps between checkpoints.
    """

    steps: int
    demonstrations: int
    demonstration: DemonstrationConfig
    rows: int
    slots: int
    micro_batches: int
    checkpoint_every: int
    optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Reinforcement learning.

    tasks_per_step groups of group_size episodes make a batch, on which ``epochs`` updates are made.
    advantage: a member of learner.advantages.ADVANTAGES. screening: trains only on tasks that the
    policy solves sometimes; None on all.
    """

    steps: int
    tasks_per_step: int
    group_size: int
    epochs: int
    advantage: Named
    loss: LossConfig
    optimizer: OptimizerConfig
    pack: PackConfig
    micro_batches: int
    screening: ScreeningConfig | None

    def __post_init__(self):
        make(ADVANTAGES, self.advantage, "train.advantage")


@dataclasses.dataclass(frozen=True)
class SuiteConfig:
    """One held-out suite: the first ``count`` tasks (0 for all) whose prompt fits, ``samples``
    episodes each.

    shortest: the ``count`` with the shortest prompts instead of the first. protocol, limits,
    engine, dtype (of the sampling copy): None for those of training.
    """

    name: str
    tasks: Named
    count: int
    samples: int
    sampling: SamplingConfig
    shortest: bool = False
    protocol: Named | None = None
    limits: Limits | None = None
    engine: EngineConfig | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """every: steps between checkpoints. keep: how many stay."""

    every: int
    keep: int


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
    """Everything a run needs. suites are evaluated before and after training."""

    seed: int
    mesh: MeshConfig
    model: ModelSpec
    protocol: Named
    tasks: Named
    limits: Limits
    sandbox: SandboxConfig
    reward: RewardConfig
    rollout: RolloutConfig
    sft: SftConfig
    train: TrainConfig
    suites: tuple[SuiteConfig, ...]
    checkpoint: CheckpointConfig
    asynchrony: AsynchronyConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    # What agents may call, in the order in which prompts declare it.
    tools: tuple[Named, ...] = DEFAULT_TOOLS
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self):
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
        tools = find_tools(self.tools, "tools")
        find_protocol(self.protocol, tools, "protocol")
        for i, suite in enumerate(self.suites):
            find_protocol(suite.protocol or self.protocol, tools, f"suites[{i}].protocol")
        find_signals(self.reward, "reward")
        source = find_source(self.tasks, "tasks")
        if self.tokenizer.source == "train" and not source.demonstrated:
            raise ValueError(
                "tokenizer.source='train' trains on demonstrations, which "
                f"tasks.name={self.tasks.name!r} lacks"
            )
        for i, suite in enumerate(self.suites):
            if find_source(suite.tasks, f"suites[{i}].tasks").endless and suite.shortest:
                raise ValueError(
                    f"suite {suite.name}: shortest=True sorts all tasks, and generated ones are "
                    "endless"
                )
        if self.limits.tokens > self.rollout.engine.length:
            raise ValueError(
                f"limits.tokens={self.limits.tokens} must not exceed "
                f"rollout.engine.length={self.rollout.engine.length}"
            )
        if self.train.pack.prompt_slots and self.train.epochs > 1:
            raise ValueError(
                f"train.pack.prompt_slots={self.train.pack.prompt_slots} means two phases, whose "
                "first is good for one "
                f"update: train.epochs={self.train.epochs} must be 1"
            )
        if self.train.pack.max_staleness != self.asynchrony.max_staleness:
            raise ValueError(
                f"train.pack.max_staleness={self.train.pack.max_staleness} must equal "
                f"asynchrony.max_staleness={self.asynchrony.max_staleness}"
            )
        if self.train.pack.drop_uninformative and (
            self.train.loss.kl_coef or self.train.loss.entropy_coef
        ):
            raise ValueError(
                "train.pack.drop_uninformative=True drops groups that "
                f"kl_coef={self.train.loss.kl_coef} and "
                f"entropy_coef={self.train.loss.entropy_coef} would learn from"
            )
        if self.train.loss.temperature != (self.rollout.sampling.temperature or 1.0):
            raise ValueError(
                f"train.loss.temperature={self.train.loss.temperature} must equal the sampler's, "
                f"rollout.sampling.temperature={self.rollout.sampling.temperature}"
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
