"""The sections of a run's config that belong to no other file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from attention.methods.api import METHODS
from attention.methods.method import Method
from models.families import PRESETS
from models.lora import LoRA
from models.model_config import REMAT_KEEPS, ModelConfig
from models.own_template import DATE
from models.quantised import Kind
from models.sharding import MeshConfig
from rl_code.config.named import Named, find, make
from rl_code.config.read_config import ConfigError, at_least, shares
from rl_code.learner.config import LearnerConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.metrics.writers import WRITERS, WriterSettings
from rl_code.rewards.combine import check_on_error
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.forks_config import ForksConfig
from rl_code.rollout.prefill_wire import PrefillConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.vllm_config import VllmConfig
from rl_code.run.step_metrics import METRICS, Metric
from rl_code.tasks.curriculum import CurriculumConfig
from rl_code.tasks.demonstrations import DemonstrationConfig
from rl_code.tasks.group_demonstrations import GroupDemonstrations
from rl_code.tasks.refill import RefillConfig
from rl_code.tasks.screening import ScreeningConfig


@dataclasses.dataclass(frozen=True)
class LoraConfig(LoRA):
    """Low-rank adapters, which alone are trained (``models.lora``)."""

    # A folder in PEFT's format whose adapters training begins with. Its adapter_config.json must
    # say the same as the keys beside this one. "" to begin with adapters that compute nothing.
    weights: str = ""

    def adapters(self) -> LoRA:
        """Settings that fix the shapes of the adapters and their computation."""
        return LoRA(self.rank, self.alpha, self.targets, self.rslora)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that is trained."""

    # The shape of the model: a key of models.families.PRESETS, or package.module:object. None where
    # ``weights`` are given, whose files tell the shape.
    preset: str | None = None
    # Origin of the parameters: a Hugging Face folder, a .gguf file, or the workdir of another
    # run, with @ and a step for a checkpoint other than the last (``rl_code.run.origin``). "" for
    # random parameters.
    weights: str = ""
    # The dtype of activations and products; on GPUs "float32" is slow, without kernels. The weights
    # that are trained are kept in float32, whatever it is.
    dtype: str = "float32"
    # True if activations are computed again in the backward pass, to save memory.
    remat: bool = False
    # With ``remat``, results of a layer that are kept all the same: "nothing"; "attention" (its
    # results and log-sum-exps: 2 (N H) numbers a token, so that its kernel runs once); "products"
    # (those and all products with the layer's matrices but for experts). For the memory of each
    # ``python -m launch.plan --remat_keeps=...``.
    remat_keeps: str = "nothing"
    # With ``remat``, whether the hidden states before each layer wait in pinned memory of the host
    # for the backward pass.
    offload_activations: bool = False
    # True if the learner's activations between the products of a layer are cut over the mesh axis
    # ``tensor`` by tokens (sequence parallelism, 2205.05198): each device keeps fewer of them, and
    # sums become as large a scatter and a gather.
    sequence_parallel: bool = False
    # The methods of attention: one name for all layers, or a tuple that is repeated until every
    # layer has a method. On the command line: nsa, "{'name': 'nsa', 'block': 32}", or
    # "('window', 'nsa')". None keeps the methods of the preset or of the weights. What is a
    # document, and sees only itself, is said by the section ``documents``, whatever the method:
    # "squid" is dense attention that insists on that section, and computes nothing of its own.
    attention: tuple[Named, ...] | Named | None = None
    # True if the methods of ``attention`` may have other parameters than those that ``weights``
    # were trained with, as when NSA takes over a model of dense attention. What is new begins as a
    # copy of the layer's own keys and values or at random from ``seed``, and has to be trained.
    change_methods: bool = False
    # True if episodes may be longer than the contexts that ``weights`` were trained for, as where
    # training is to extend these.
    longer_context: bool = False
    # For a model with experts, ``MoE.balance_loss``: the weight of the loss that evens out their
    # load; 0 for none.
    balance_loss: float = 0.0
    # For a model whose experts have a ranking bias, ``MoE.balance_rate``: by how much each update
    # moves it to even out the load; 0 for none.
    balance_rate: float = 0.0
    # For layers with an indexer (dsa), ``DSA.index_loss``: the weight of the loss by which indexers
    # learn; 0 for indexers that stay as they are.
    index_loss: float = 0.0
    # For such layers, ``DSA.all_keys``: True for the stage in which queries attend to all keys,
    # while the indexers learn.
    index_all_keys: bool = False
    # With this section only low-rank adapters of the model's matrices are trained; None trains all
    # parameters.
    lora: LoraConfig | None = None
    # Heads, feed-forward size and vocabulary are padded until they divide by this number, without a
    # change of what the model computes (``models.padding``). For meshes whose axis ``tensor`` does
    # not divide them, such as 72 for 64 heads; it must be a multiple of that axis in every mesh of
    # the run. Checkpoints and weights of the run are padded, exported files are not. None for the
    # shape as it is.
    pad_for: int | None = None
    # For a model with experts, whether whole experts are cut over the mesh axes ``expert`` and
    # ``tensor`` together. False cuts them over ``expert``, and each one's feed-forward size over
    # ``tensor``. With True the tokens of a row are cut over ``tensor`` before they go to their
    # experts, so no token is sent twice; ``sequence_parallel`` has them cut already.
    fold_experts: bool = False
    # Where experts are cut over devices, a device has room for so many times the mean of the tokens
    # that come to a device. What is more comes in further rounds: this changes memory and time, and
    # no result.
    expert_buffer: float = 2.0
    # The experts of each layer are padded until their number divides by this one, as 128 experts to
    # 144 for 72 devices, without a change of what the model computes. It must be a multiple of
    # the devices over which experts are cut, in every mesh of the run. None for no padding.
    pad_experts_for: int | None = None

    def __post_init__(self):
        at_least(self, pad_for=1, pad_experts_for=1)
        if not 0.0 < self.expert_buffer < math.inf:
            raise ValueError(f"expert_buffer={self.expert_buffer} must be more than 0")
        if self.remat_keeps not in REMAT_KEEPS:
            raise ValueError(
                f"remat_keeps={self.remat_keeps!r} must be one of {', '.join(REMAT_KEEPS)}"
            )
        if self.remat_keeps != "nothing" and not self.remat:
            raise ValueError(
                f"remat_keeps={self.remat_keeps!r} says what remat keeps: set remat=True"
            )
        if self.offload_activations and not self.remat:
            raise ValueError(
                "offload_activations=True moves what remat keeps to the host: set remat=True"
            )

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
    # family if none came with it; where several came, "default", and "tool_use" for conversations
    # with tools. "own:NAME": the one of that name. "family": always that of the family. Anything
    # else is the path of a jinja2 file.
    chat_template: str = "own"
    # Variables of that template, such as dict(enable_thinking=False).
    template_arguments: Mapping[str, bool | int | float | str] = dataclasses.field(
        default_factory=dict
    )
    # The day that a template is told which asks for the time: a clock would change prompts.
    template_date: str = DATE
    # With source "train": how many entries the vocabulary has.
    vocab_size: int = 512
    # With source "train": how many demonstrations the vocabulary is learned from.
    texts: int = 2000


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Settings for the sampling of episodes."""

    engine: EngineConfig = EngineConfig()
    # The server of vLLM, where ``engine.name`` is "vllm".
    vllm: VllmConfig = VllmConfig()
    sampling: SamplingConfig = SamplingConfig()
    # Threads that carry out tool calls and grade episodes. Each waits for one sandbox at a time.
    workers: int = 4
    # Seconds after which the run ends because nothing can be sampled and no worker comes back: its
    # threads hang. It is no limit of tools, which are ``limits.command_s`` and ``limits.tools_s``,
    # and must be more than these allow, or a model could end the run by waiting. None for a value
    # that follows from the limits.
    worker_deadline_s: float | None = None
    # Seconds that the sampler waits for tools, at most, while more episodes wait for them than can
    # go on: a dispatch of few rows takes almost as long as one of many, and on a CPU it takes the
    # processor from the tools. It changes no token. 0 not to wait.
    gather_s: float = 0.0
    # The dtype of the copy of the model that samples; None for ``model.dtype``.
    dtype: str | None = None
    # The matrices of layers in that copy: "int8" or "fp8" numbers with a scale for each output,
    # quantised anew from every version (``models.quantised``). The trainer keeps whole weights, so
    # the sampler is another policy by choice: ``policy/mismatch_*`` says by how much, and
    # ``train.loss`` has corrections for it. Versions are published so, and sampling them again
    # gives the same tokens. None for matrices in ``dtype``.
    weights: Kind | None = None
    # Devices of an actor. Each of its shards of rows has the whole weights, but for experts that
    # are cut over ``expert``. So ``fsdp`` is for devices that learn.
    mesh: MeshConfig = MeshConfig()
    # True if an actor in the learner's process samples on devices of its own, which come after the
    # learner's in the list of devices. False: it samples on the learner's devices.
    apart: bool = False
    # Devices that prefill prompts, which come after all others in the list of devices. None to
    # prefill on the devices that decode.
    prefill_mesh: MeshConfig | None = None
    # With this section a process of the role prefill prefills the prompts of all actors that have
    # processes of their own, and hands them the pages. None to prefill where rows decode.
    prefill: PrefillConfig | None = None
    # Use of the choices that layers made for each token while it was sampled: blocks of NSA, and
    # experts. "compare" notes it, and metrics tell how much of it the trainer would choose too.
    # "replay" has the trainer take it instead of its own choice. None notes nothing.
    picks: Literal["compare", "replay"] | None = None
    # With this section episodes that are trained on are forked at turn borders, and what goes on
    # from there tells what their turns are worth (``train.advantage`` "monte_carlo"). None for
    # groups that part at their prompt alone.
    forks: ForksConfig | None = None

    def __post_init__(self):
        at_least(self, workers=1, gather_s=0)
        for name, mesh in (("mesh", self.mesh), ("prefill_mesh", self.prefill_mesh)):
            if mesh is not None and mesh.fsdp not in (None, 1):
                raise ValueError(
                    f"{name}.fsdp={mesh.fsdp} must be 1: devices that only sample have the whole "
                    f"weights; set {name}.data={mesh.row_shards} for as many rows"
                )
            if mesh is not None and mesh.context not in (None, 1):
                raise ValueError(
                    f"{name}.context={mesh.context} must be 1: devices that only sample have whole "
                    f"rows; set {name}.data={mesh.row_shards * mesh.context} for as many rows"
                )
        if self.prefill is not None:
            self._check_prefill(self.prefill)

    def _check_prefill(self, prefill: PrefillConfig) -> None:
        """Raises ValueError where a prefill process cannot serve actors."""
        if prefill.mesh.tensor != self.mesh.tensor:
            raise ValueError(
                f"prefill.mesh.tensor={prefill.mesh.tensor} must be mesh.tensor="
                f"{self.mesh.tensor}: sums over other parts of a product round differently"
            )
        if self.prefill_mesh is not None:
            raise ValueError(
                "prefill, a process that prefills prompts, and prefill_mesh, devices of the actor "
                "that do, exclude each other: set one of them to None"
            )


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Warm start: supervised training on demonstrations before reinforcement learning begins."""

    # Updates of the warm start.
    steps: int
    optimizer: OptimizerConfig
    # Number of different demonstrations. Training goes through them again and again. Each
    # is cut to ``slots`` tokens.
    demonstrations: int = 60_000
    # The source of the demonstrated tasks; None for the training tasks.
    tasks: Named | None = None
    demonstration: DemonstrationConfig = DemonstrationConfig()
    # Demonstrations of tasks of the first of ``suites``, whose loss is told before and after: the
    # metric sft/held_out_loss of the first and of the last step. 0 for none.
    held_out: int = 0
    # Weight of the tokens that the agent reads, beside 1 for those that it writes. Predicting them
    # teaches a model without knowledge how files repeat what was said before them, which few of the
    # tokens that it writes tell.
    weight_of_read: float = 0.0
    # Texts of tokens on which much of what follows depends and which are few, as a verdict, and
    # the weight that they have where the agent writes them.
    decisive: tuple[str, ...] = ()
    weight_of_decisive: float = 4.0
    # Rows of a batch.
    rows: int = 32
    # Tokens of a row.
    slots: int = 160
    # Rows are halved, and their number is doubled, as often as the examples of a batch still fit,
    # down to this many tokens: attention within short rows is cheap. Each shape is compiled once.
    # None for rows of ``slots`` tokens always.
    least_slots: int | None = None
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
        shares(self, "weight_of_read")
        if self.weight_of_decisive < 0.0:
            raise ValueError(f"weight_of_decisive={self.weight_of_decisive} must be at least 0")
        if self.least_slots is not None and not 2 <= self.least_slots <= self.slots:
            raise ValueError(
                f"least_slots={self.least_slots} must be at least 2 and at most slots={self.slots}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(LearnerConfig):
    """Reinforcement learning: which tasks a step has; and what the learner makes of them."""

    # Steps of the whole run. The number may be raised on a run that has finished, which then goes
    # on; see also ``OptimizerConfig.total_steps``.
    steps: int
    # Groups of a batch, each of another task.
    tasks_per_step: int
    # Episodes of a group: how often each task is played in a step.
    group_size: int
    # With this section only tasks that the policy solves sometimes are trained on; None trains on
    # all tasks.
    screening: ScreeningConfig | None = None
    # With this section kinds of tasks of which the policy solves some episodes and not others are
    # drawn more often; None draws all tasks alike.
    curriculum: CurriculumConfig | None = None
    # With this section one trajectory of each group is a demonstration. None for groups that the
    # policy samples alone.
    demonstrations: GroupDemonstrations | None = None
    # With this section further tasks are drawn for a step in place of those whose groups have
    # nothing to teach. None trains on smaller batches then.
    refill: RefillConfig | None = None
    # True if tasks are drawn in a new order in every epoch; False for the order of their source, as
    # where later ones are on the same repository as earlier ones.
    shuffled: bool = True
    # True if training uses tasks whose results can be forged without a guess (``tasks.guards``).
    # Those of a source without end are not looked at.
    forgeable: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.screening is not None and self.curriculum is not None:
            raise ValueError(
                "screening and curriculum both choose which tasks are drawn: set one of them to "
                "None. Screening is for lists, a curriculum for streams and tasks of several kinds"
            )
        if not self.shuffled and (self.screening is not None or self.curriculum is not None):
            raise ValueError(
                "shuffled=False draws tasks in the order of their source, and screening and "
                "curriculum choose which are drawn: leave both out"
            )
        at_least(self, steps=0, tasks_per_step=1, group_size=1)
        if self.demonstrations is not None and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} must be at least 2: one trajectory of a group is a "
                "demonstration"
            )
        if self.refill is not None:
            self._check_refill()

    def _check_refill(self) -> None:
        """Raises ValueError where a batch cannot be filled again."""
        if self.group_size < 2:
            raise ValueError(
                f"refill waits for groups with advantages that are not 0: group_size="
                f"{self.group_size} must be at least 2"
            )
        if not self.pack.drop_uninformative:
            raise ValueError(
                "refill draws tasks in place of groups that pack.drop_uninformative=False keeps in "
                "the batch: set it to True, or refill to None"
            )
        if self.pack.prompt_slots:
            raise ValueError(
                f"pack.prompt_slots={self.pack.prompt_slots} means two phases, whose first needs "
                "all prompts before anything is sampled: set it to 0, or refill to None"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Settings for saving the state of training, and for the checkpoints that are kept."""

    # Steps between checkpoints.
    every: int = 20
    # Number of the newest checkpoints that are kept.
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
    """Writers of the metrics of each step, and extra metrics to compute."""

    # Writers of metrics: keys of metric_writers.WRITERS, with their settings. "jsonl" must
    # be among them, since the report and a continued run read its file.
    writers: tuple[Named, ...] = (Named("jsonl"), Named("tensorboard"))
    # Metrics beside the usual ones: keys of step_metrics.METRICS, or package.module:object, with
    # their settings.
    extra: tuple[Named, ...] = ()
    # An exception of an extra metric: "count" it in metrics/errors and leave the metric out of the
    # step, or "stop" the run.
    on_error: str = "count"

    def __post_init__(self) -> None:
        check_on_error(self.on_error)

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
