"""The keys of a run's config, as its file says them: nothing is derived or checked here.

``config.RunConfig`` is what runs: complete, and its sections agree.
"""

from __future__ import annotations

import dataclasses

from models.sharding import MeshConfig
from rl_code.config.named import Named
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.milestones import MilestonesConfig
from rl_code.environment.sandbox.pool import SandboxConfig
from rl_code.environment.summaries import SummariesConfig
from rl_code.environment.tools.api import DEFAULT as DEFAULT_TOOLS
from rl_code.evaluation.during import EvaluateConfig
from rl_code.evaluation.suites import SuiteConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.rewards.combine import RewardConfig
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.rollout.memory import MemoryConfig
from rl_code.run.sections import (
    CheckpointConfig,
    MetricsConfig,
    ModelSpec,
    RolloutConfig,
    SftConfig,
    TokenizerConfig,
    TrainConfig,
)
from rl_code.run.serving import ServingConfig
from rl_code.store.record_keeper import RecordConfig
from rl_code.types import Limits


@dataclasses.dataclass(frozen=True)
class RunKeys:
    """Everything that a config may say of a run."""

    model: ModelSpec
    # Format in which an episode is text, and the text of a message is read as calls of tools: a
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
    serving: ServingConfig = ServingConfig()
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
    # With this section, results of tools and parts of prompts are documents: runs of tokens that
    # see only themselves, whose keys are computed once. None for contexts without documents.
    documents: DocumentsConfig | None = None
    # Which notes episodes leave for later ones.
    memory: MemoryConfig = MemoryConfig()
    # With this section the agent is asked for a summary where its context has grown long, and goes
    # on in a new one that begins with it. None for episodes of one context.
    summaries: SummariesConfig | None = None
    # The agent of others that plays all episodes, through the endpoint: a key of
    # harness.api.HARNESSES, with its settings. None for episodes of our own, with ``tools``.
    harness: Named | None = None
    # With this section visible tests run on the files after each message, for the advantage
    # "milestones". None to grade the work at the end alone.
    milestones: MilestonesConfig | None = None

    def demonstrated(self) -> tuple[str, Named]:
        """The source of the tasks that are demonstrated: (its dotted key, what stands there)."""
        if self.sft is not None and self.sft.tasks is not None:
            return "sft.tasks", self.sft.tasks
        return "tasks", self.tasks

    def optimizers(self) -> dict[str, OptimizerConfig]:
        """The optimizers of a learner, by the dotted name of their section."""
        sections = {"train": self.train, "train.value": self.train.value, "sft": self.sft}
        return {name: x.optimizer for name, x in sections.items() if x is not None}

    def offloaded(self) -> str | None:
        """The first key, dotted, by which a learner's arrays wait in the host's memory; None for no
        such key.
        """
        for name, optimizer in self.optimizers().items():
            if optimizer.offload:
                return f"{name}.optimizer.offload"
        return "model.offload_activations" if self.model.offload_activations else None
