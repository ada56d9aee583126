"""What a run is configured by: a section for each part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from attention.methods.api import METHODS
from attention.methods.method import Method
from attention.picks import choosing
from models.families import PRESETS
from models.sharding import MeshConfig
from models.transformer import ModelConfig
from rl_code.derive import settle
from rl_code.documents import DocumentsConfig
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.sandbox.pool import SandboxConfig
from rl_code.environment.tools.api import DEFAULT as DEFAULT_TOOLS
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation import during
from rl_code.evaluation.during import EvaluateConfig
from rl_code.evaluation.suites import SuiteConfig
from rl_code.learner.advantages import ADVANTAGES
from rl_code.learner.batching import PackConfig
from rl_code.learner.objective import LossConfig
from rl_code.learner.update import OptimizerConfig
from rl_code.metric_writers import WRITERS, WriterSettings
from rl_code.named import Named, find, make
from rl_code.read_config import ConfigError, at_least, follows
from rl_code.record_keeper import RecordConfig
from rl_code.rewards.combine import RewardConfig, find_signals
from rl_code.rollout.engine_config import EngineConfig
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

    # The shape of the model: a key of models.families.PRESETS, or package.module:object. None where
    # ``weights`` are given, whose files tell the shape.
    preset: str | None = None
    # Where the parameters come from: a Hugging Face folder, a .gguf file, or the workdir of another
    # run, with @ and a step for a checkpoint other than the last (``rl_code.origin``). "" for
    # random parameters.
    weights: str = ""
    # The dtype of the weights that are trained.
    dtype: str = "float32"
    # Whether activations are computed again in the backward pass, to save memory.
    remat: bool = False
    # The methods of attention: one name for all layers, or a tuple that is repeated until every
    # layer has a method. On the command line: nsa, "{'name': 'nsa', 'block': 32}", or
    # "('window', 'nsa')". None keeps the methods of the preset or of the weights.
    attention: tuple[Named, ...] | Named | None = None

    def shape(self) -> ModelConfig | None:
        """The preset's shape; None without a preset. Raises ConfigError."""
        return find(PRESETS, self.preset, "config.model.preset") if self.preset else None

    def known_methods(self) -> tuple[Method, ...]:
        """The methods of ``attention`` or of the preset; () where only ``weights`` tell them.

        Raises ConfigError.
        """
        methods = self.methods()
        shape = self.shape()
        if methods is None and shape is not None:
            return shape.attention
        return methods or ()

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
    """The tokenizer. Without this section it is the one that belongs to the weights."""

    # "file" reads the tokenizer from a file. "train" learns byte-level BPE from demonstrations,
    # for a model with random parameters.
    source: Literal["train", "file"] = "file"
    # A tokenizer.json, its folder, or a .gguf file. "" for the tokenizer that belongs to
    # ``model.weights``.
    path: str = ""
    # The chat template. "own": the template that came with the tokenizer, or that of the model's
    # family if none came with it. "family": always that of the family. Anything else is the path
    # of a jinja2 file.
    chat_template: str = "own"
    # With source "train": how many entries the vocabulary has.
    vocab_size: int = 512
    # With source "train": how many demonstrations the vocabulary is learned from.
    texts: int = 2000


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How episodes are sampled."""

    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    # Threads that carry out tool calls and grade episodes. Each waits for one sandbox at a time.
    workers: int = 4
    # Seconds after which a tool that does not answer counts as a fault of this system, which ends
    # the run. None for a value that follows from the limits. It must be more than the limits allow
    # tools to take, or a model could end the run by waiting.
    tool_timeout_s: float | None = None
    # The dtype of the copy of the model that samples; None for ``model.dtype``.
    dtype: str | None = None
    # Devices of an actor.
    mesh: MeshConfig = MeshConfig()
    # Whether an actor in the learner's process samples on devices of its own, which come after the
    # learner's in the list of devices. False: it samples on the learner's devices.
    apart: bool = False
    # Devices that prefill prompts, which come after all others in the list of devices. None to
    # prefill on the devices that decode.
    prefill_mesh: MeshConfig | None = None
    # What is done with the blocks that layers of NSA chose for each token while it was sampled.
    # "compare" notes them, and metrics tell how many of them the trainer would choose too. "replay"
    # has the trainer attend to them instead of its own choice. None notes nothing.
    picks: Literal["compare", "replay"] | None = None

    def __post_init__(self):
        at_least(self, workers=1)


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Warm start: supervised training on demonstrations before reinforcement learning begins."""

    # Updates of the warm start.
    steps: int
    optimizer: OptimizerConfig
    # How many different demonstrations there are. Training goes through them again and again. Each
    # is cut to ``slots`` tokens.
    demonstrations: int = 60_000
    # The source of the demonstrated tasks; None for the training tasks.
    tasks: Named | None = None
    demonstration: DemonstrationConfig = DemonstrationConfig()
    # Rows of a batch.
    rows: int = 32
    # Tokens of a row.
    slots: int = 160
    # Parts of a batch whose gradients are computed one after another, to save memory.
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

    # Steps of the whole run. The number may be raised on a run that has finished, which then goes
    # on; see also ``OptimizerConfig.total_steps``.
    steps: int
    # Groups of a batch, each of another task.
    tasks_per_step: int
    # Episodes of a group: how often each task is played in a step.
    group_size: int
    optimizer: OptimizerConfig
    # Updates made on each batch.
    epochs: int = 1
    # How advantages are computed from rewards: a member of learner.advantages.ADVANTAGES, with its
    # settings.
    advantage: Named = Named("grpo")
    loss: LossConfig = LossConfig()
    pack: PackConfig = PackConfig()
    # Parts of a batch whose gradients are computed one after another, to save memory. None for
    # parts that have one row for each device.
    micro_batches: int | None = None
    # What is done with the sampler's picks.
    picks: str | None = follows("rollout.picks", None)
    # With this section only tasks that the policy solves sometimes are trained on; None trains on
    # all tasks.
    screening: ScreeningConfig | None = None

    def __post_init__(self):
        at_least(self, steps=0, tasks_per_step=1, group_size=1, epochs=1, micro_batches=1)
        make(ADVANTAGES, self.advantage, "config.train.advantage")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state of training is saved, and which checkpoints are kept."""

    # Steps between checkpoints.
    every: int = 20
    # How many of the newest checkpoints are kept.
    keep: int = 2
    # The name of a metric, such as "reward/solved". The checkpoint with its highest value is kept
    # as well and can be read as "best". With a metric of ``evaluate``, such as
    # "eval/held_out/pass@1", there is a checkpoint of every step that is evaluated. None keeps only
    # the newest.
    best: str | None = None

    def __post_init__(self):
        at_least(self, every=1, keep=1)


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Where the metrics of each step are written, and which extra metrics are computed."""

    # Where metrics are written: keys of metric_writers.WRITERS, with their settings. "jsonl" must
    # be among them, since the report and a continued run read its file.
    writers: tuple[Named, ...] = (Named("jsonl"), Named("tensorboard"))
    # Metrics beside the usual ones: keys of step_metrics.METRICS, or package.module:object, with
    # their settings.
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
    """Everything a run needs.

    A key that the config's file leaves out has its default here, or a value that follows from other
    keys (``derive.settle``). A RunConfig is therefore always complete.
    """

    model: ModelSpec
    # How an episode is written as text, and how the text of a message is read as calls of tools: a
    # key of environment.protocols.api.PROTOCOLS, with its settings.
    protocol: Named
    # The source of the training tasks: a key of tasks.api.SOURCES, with its settings.
    tasks: Named
    limits: Limits
    reward: RewardConfig
    train: TrainConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    # The tools that the agent may call, in the order in which the prompt declares them.
    tools: tuple[Named, ...] = DEFAULT_TOOLS
    # Seed of the random choices of a run: parameters, tasks, demonstrations and sampling.
    seed: int = 0
    # Devices that learn.
    mesh: MeshConfig = MeshConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    # The warm start on demonstrations; None to begin with the model as it is.
    sft: SftConfig | None = None
    # The suites of held-out tasks that are evaluated before and after training.
    suites: tuple[SuiteConfig, ...] = ()
    # Evaluations while training goes on; None for those before and after it alone.
    evaluate: EvaluateConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    metrics: MetricsConfig = MetricsConfig()
    record: RecordConfig = RecordConfig()
    # With this section, answers of tools and parts of prompts are documents: runs of tokens that
    # see only themselves, whose keys are computed once. None for contexts without documents.
    documents: DocumentsConfig | None = None

    def __post_init__(self):
        self._check_names()
        for name, section in settle(self).items():
            object.__setattr__(self, name, section)
        self._check_agreement()

    def demonstrated(self) -> tuple[str, Named]:
        """The source of the tasks that are demonstrated: (its dotted key, what stands there)."""
        if self.sft is not None and self.sft.tasks is not None:
            return "sft.tasks", self.sft.tasks
        return "tasks", self.tasks

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
        during.check(self.evaluate, self.suites, self.checkpoint.best)

    def _check_agreement(self) -> None:
        """Raises ValueError where sections contradict each other, which none of them can see."""
        train = self.train
        path, named = self.demonstrated()
        demonstrated = find_source(named, f"config.{path}").demonstrated
        if self.tokenizer.source == "train" and not demonstrated:
            raise ValueError(
                f"tokenizer.source='train' trains on demonstrations, which {path}.name="
                f"{named.name!r} lacks"
            )
        if self.sft is not None and not demonstrated:
            raise ValueError(
                f"sft trains on demonstrations, which {path}.name={named.name!r} lacks; "
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
        if self.documents is not None:
            self._check_documents(self.documents)
        self._check_picks()
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

    def _check_picks(self) -> None:
        """Raises ConfigError where nothing can be noted or replayed."""
        picks = self.rollout.picks
        if picks is None:
            return
        methods = self.model.known_methods()
        if methods:  # else the weights tell them, and ``run`` asks them
            check_chooses(methods, picks)
        if self.train.pack.prompt_slots:
            raise ConfigError(
                f"config.rollout.picks = {picks!r}: an update in two phases "
                f"(train.pack.prompt_slots={self.train.pack.prompt_slots}) cannot use picks; leave "
                "one of the two out"
            )

    def _check_documents(self, documents: DocumentsConfig) -> None:
        """Raises ValueError where documents do not agree with other sections."""
        documents.check_page()
        if documents.longest > self.limits.tokens:
            raise ValueError(
                f"documents.longest={documents.longest} must not exceed "
                f"limits.tokens={self.limits.tokens}"
            )
        if self.train.pack.prompt_slots:
            raise ValueError(
                f"train.pack.prompt_slots={self.train.pack.prompt_slots} means two phases, which "
                "are not for documents: leave one of the two out"
            )
        for at, suite in enumerate(self.suites):
            if suite.engine is not None and suite.engine.page != documents.page:
                raise ValueError(
                    f"suites[{at}].engine.page={suite.engine.page} must be "
                    f"rollout.engine.page={documents.page}: documents fill the same pages in "
                    "evaluations"
                )


def check_chooses(methods: Sequence[Method], picks: str | None) -> None:
    """Raises ConfigError if picks are asked for and no layer's can be noted."""
    if picks is not None and choosing(methods) is None:
        names = ", ".join(dict.fromkeys(type(method).__name__ for method in methods))
        raise ConfigError(
            f"config.rollout.picks = {picks!r}: no layer has attention whose picks can be noted "
            f"(nsa); the model's are {names}; set rollout.picks to None"
        )


def refuse_sync(config: RunConfig) -> None:
    """Raises ConfigError if a learner and actors in processes of their own cannot run a config."""
    if config.asynchrony.mode == "sync":
        raise ConfigError(
            "asynchrony.mode = 'sync': a learner and actors in processes of their own need "
            "'one_step' or 'in_flight'"
        )


def meshes(config: RunConfig, role: str = "all") -> list[MeshConfig]:
    """The meshes of a process in the order in which they take devices: of learning, of sampling,
    of prefill. A mesh that the role does not use is left out.
    """
    rollout = config.rollout
    sampling = [rollout.mesh] if role == "actor" or (role == "all" and rollout.apart) else []
    prefill = [rollout.prefill_mesh] if rollout.prefill_mesh and role != "learner" else []
    return [config.mesh] * (role != "actor") + sampling + prefill
