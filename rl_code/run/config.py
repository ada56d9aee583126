"""Whole config of a run: its sections, and the checks that they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from attention.methods.method import Method
from attention.picks import choosing
from models.families import PRESETS
from models.model_config import MoE
from models.sharding import MeshConfig
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.milestones import MilestonesConfig
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.sandbox.pool import SandboxConfig
from rl_code.environment.summaries import SummariesConfig, longest_context
from rl_code.environment.tools.api import DEFAULT as DEFAULT_TOOLS
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.tool import Tool
from rl_code.evaluation import during
from rl_code.evaluation.during import EvaluateConfig
from rl_code.evaluation.suites import SuiteConfig
from rl_code.harness.api import find_agent
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.rewards.combine import RewardConfig, find_signals
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.rollout.forks import ForksConfig
from rl_code.rollout.memory import MemoryConfig
from rl_code.rollout.prefill_wire import PrefillConfig
from rl_code.run.derive import longest_wait_s, settle
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
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import check_demonstrable
from rl_code.types import Limits


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a run needs.

    A key that the config's file leaves out has its default here, or a value that follows from other
    keys (``derive.settle``). A RunConfig is therefore always complete.
    """

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
        reasons = [method.needs_documents for method in self.model.known_methods()]
        if self.documents is None and any(reasons):
            raise ConfigError(f"config.model.attention: {next(filter(None, reasons))}")
        # A wrong name is found now and not in the first episode.
        tools = find_tools(self.tools, "config.tools")
        protocol = find_protocol(self.protocol, tools, "config.protocol")
        if self.summaries is not None and "sum up" not in protocol.requested([], "sum up"):
            raise ConfigError(
                f"config.summaries: the protocol {self.protocol.name!r} writes no results, so no "
                "summary can be asked for; take one with calls, such as 'hermes' or 'compact'"
            )
        if self.train.demonstrations is not None:
            self._check_demonstrations(protocol, tools)
        if self.sft is not None:
            source = self.demonstrated()[1].name
            agent = self.harness and find_agent(self.harness, "config.harness")
            check_demonstrable(protocol, tools, source, agent)
        rule = self.memory.found()
        keepers = [name for name, tool in tools.items() if tool.notes]
        if rule.keeps(tools) and self.record.keep is not None:
            of = ", ".join(keepers) if rule.by_calls else f"memory.rule = {self.memory.rule.name!r}"
            raise ConfigError(
                f"config.record.keep = {self.record.keep}: the notes of {of} are read from the "
                "whole record; set it to None, or keep no notes"
            )
        if not rule.by_calls and "memory_recall" not in tools:
            raise ConfigError(
                f"config.memory.rule = {self.memory.rule.name!r}: no tool reads what is kept; add "
                "'memory_recall' to config.tools"
            )
        if self.harness is not None and not rule.by_calls:
            raise ConfigError(
                f"config.memory.rule = {self.memory.rule.name!r}: an agent of others reads no "
                "notes; leave memory out"
            )
        find_signals(self.reward, "config.reward")
        if self.harness is not None:
            self._check_harness(self.harness)
        for at, suite in enumerate(self.suites):
            path = f"config.suites[{at}]"
            find_protocol(suite.protocol or self.protocol, tools, f"{path}.protocol")
            endless = find_source(suite.tasks, f"{path}.tasks").endless
            if endless and (suite.shortest or not suite.count):
                raise ValueError(
                    f"suite {suite.name}: shortest=True sorts all tasks and count=0 plays all, and "
                    f"those of {suite.tasks.name!r} are endless"
                )
        sources = [("tasks", self.tasks)]
        sources += [(f"suites[{at}].tasks", suite.tasks) for at, suite in enumerate(self.suites)]
        for key, named in sources:
            source = find_source(named, f"config.{key}")
            if source.harness and (self.harness is None or self.harness.name != source.harness):
                raise ConfigError(
                    f"config.{key} = {named.name!r}: its tasks can be played only with "
                    f"config.harness = {source.harness!r}"
                )
            if source.has_drills():
                raise ConfigError(
                    f"config.{key}: stages with drill=True have no tests, so they can only stand "
                    "in config.sft.tasks"
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
            longest_s = longest_wait_s(self, limits)
            if self.rollout.worker_deadline_s <= longest_s:
                raise ValueError(
                    f"rollout.worker_deadline_s={self.rollout.worker_deadline_s:g} must be above "
                    f"the {longest_s:g} s that {name}limits lets tools and grading "
                    "take; a model that waits would end the run"
                )
            longest = longest_context(self.summaries, limits)
            if longest > shapes.length:
                key = f"{name}limits.tokens={limits.tokens}"
                if longest < limits.tokens:
                    key = f"summaries.context={longest}"
                raise ValueError(f"{key} must not exceed {engine}.length={shapes.length}")
        if self.documents is not None:
            self._check_documents(self.documents)
        self._check_milestones()
        if self.summaries is not None:
            self._check_summaries(self.summaries)
        if self.memory.left_out:
            self._check_left_out()
        self._check_picks()
        if self.rollout.forks is not None:
            self._check_forks(self.rollout.forks)
        elif train.continuations or train.advantage.name == "monte_carlo":
            key = "continuations" if train.continuations else "advantage"
            value = train.continuations or train.advantage.name
            raise ConfigError(
                f"config.train.{key} = {value!r} needs continuations, and "
                "config.rollout.forks = None samples none; set it to {} or to settings of its own"
            )
        if self.mesh.context not in (None, 1):
            self._check_context(self.mesh.context)
        if self.model.lora is not None:
            self._check_adapters()
        if train.pack.prompt_slots and self.model.offload_activations:
            raise ValueError(
                f"train.pack.prompt_slots={train.pack.prompt_slots} means two phases, between "
                "which activations are kept on the device: set model.offload_activations=False"
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
        if train.teacher is not None:
            self._check_teacher(train.teacher)
        if train.pack.rows % train.micro_batches:
            raise ValueError(
                f"train.pack.rows={train.pack.rows} must divide into "
                f"train.micro_batches={train.micro_batches}"
            )

    def _check_teacher(self, teacher: TeacherConfig) -> None:
        """Raises ConfigError where a teacher does not go with other sections."""
        if self.train.pack.drop_uninformative:
            raise ConfigError(
                "config.train.pack.drop_uninformative = True drops groups of equal rewards, which "
                "config.train.teacher would teach: set it to False"
            )
        if teacher.feedback is None:
            return
        name = f"config.train.teacher.feedback = {teacher.feedback.name!r}"
        if self.documents is not None:
            raise ConfigError(
                f"{name}: documents have other places behind it; leave one of the two out"
            )
        if self.harness is not None:
            raise ConfigError(
                f"{name}: an agent of others ({self.harness.name!r}) writes its prompts by itself, "
                "so none can be made with feedback; leave it out"
            )

    def _check_demonstrations(self, protocol: Protocol, tools: Mapping[str, Tool]) -> None:
        """Raises ConfigError where groups cannot hold demonstrations."""
        path = "config.train.demonstrations"
        if not find_source(self.tasks, "config.tasks").demonstrated:
            raise ConfigError(f"{path}: the tasks of {self.tasks.name!r} have none; leave it out")
        if self.harness is not None:
            raise ConfigError(
                f"{path}: what {self.harness.name!r} asks for is not known before; leave "
                "demonstrations out, or harness"
            )
        if self.rollout.forks is not None:
            raise ConfigError(
                f"{path}: nothing goes on from the turns of a demonstration; leave demonstrations "
                "out, or rollout.forks"
            )
        if self.rollout.picks is not None:
            raise ConfigError(
                f"{path}: no sampler notes picks of demonstrations; set rollout.picks to None"
            )
        try:
            check_demonstrable(protocol, tools, self.tasks.name)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def _check_milestones(self) -> None:
        """Raises ConfigError where milestones are not measured, or cannot be."""
        if self.milestones is None:
            if self.train.advantage.name == "milestones":
                raise ConfigError(
                    "config.train.advantage = 'milestones': none are measured; set "
                    "config.milestones={}"
                )
            return
        if self.harness is not None:
            raise ConfigError(
                f"config.milestones: the files of {self.harness.name!r} are not looked at between "
                "its messages; leave milestones out, or harness"
            )
        tools = find_tools(self.tools, "config.tools")
        if asking := [name for name, tool in tools.items() if tool.delegation is not None]:
            raise ConfigError(
                f"config.milestones: messages of sub-agents ({', '.join(asking)}) have none; leave "
                "milestones out, or these tools"
            )

    def _check_summaries(self, summaries: SummariesConfig) -> None:
        """Raises ConfigError for limits of training in which no summary could be asked for."""
        longest = summaries.longest(self.limits)
        if self.limits.turns < 2:
            raise ConfigError(
                f"config.limits.turns = {self.limits.turns}: a summary is asked for between two "
                "messages; allow more of them, or leave summaries out"
            )
        if summaries.trigger + summaries.tokens > longest:
            raise ConfigError(
                f"config.summaries.trigger = {summaries.trigger}: with summaries of "
                f"{summaries.tokens} tokens it must be at most {longest - summaries.tokens}, since "
                f"a context has at most {longest} tokens"
            )

    def _check_left_out(self) -> None:
        """Raises ConfigError where the worth of a note could not be told, or not be trained."""
        key = f"config.memory.left_out = {self.memory.left_out}"
        if self.memory.left_out >= self.train.group_size:
            raise ConfigError(
                f"{key}: it must be less than train.group_size = {self.train.group_size}, since "
                "some episodes of a group must read the note"
            )
        if self.train.pack.prompt_slots:
            raise ConfigError(
                f"{key}: an update in two phases (train.pack.prompt_slots="
                f"{self.train.pack.prompt_slots}) begins before it is known which stores are "
                "credited; leave one of the two out"
            )
        if self.harness is not None:
            raise ConfigError(f"{key}: an agent of others stores no notes; set it to 0")
        beside = {
            "train.value": self.train.value,
            "train.teacher": self.train.teacher,
            "train.demonstrations": self.train.demonstrations,
            "rollout.forks": self.rollout.forks,
        }
        if used := [name for name, section in beside.items() if section is not None]:
            raise ConfigError(
                f"{key}: the episodes of a group that read the note are compared with those that "
                f"do not, without {used[0]}; leave one of the two out"
            )

    def _check_harness(self, harness: Named) -> None:
        """Raises ConfigError for what an agent of others cannot be played with."""
        find_agent(harness, "config.harness")
        name = f"config.harness = {harness.name!r}"
        if self.summaries is not None:
            raise ConfigError(
                f"{name}: an agent of others decides itself when to sum up; leave summaries out"
            )
        if self.documents is not None:
            raise ConfigError(f"{name}: agents of others write no documents; leave documents out")
        if self.rollout.picks is not None:
            raise ConfigError(
                f"{name}: picks are not noted for its trees of contexts; set rollout.picks to None"
            )
        tools = find_tools(self.tools, "config.tools")
        if not find_protocol(self.protocol, tools, "config.protocol").converses:
            raise ConfigError(
                f"{name}: the protocol {self.protocol.name!r} has no place for conversations; take "
                "a chat, such as 'hermes', or 'compact'"
            )

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

    def _check_context(self, parts: int) -> None:
        """Raises ValueError where rows cannot be cut over the axis context."""
        pack = self.train.pack
        rows = {"train.pack.slots": pack.slots, "train.pack.prompt_slots": pack.prompt_slots}
        if self.train.teacher is not None:
            rows["train.teacher.slots"] = self.train.teacher.slots
        if self.sft is not None:
            rows["sft.slots"] = self.sft.slots
        for name, slots in rows.items():
            if slots % parts:
                raise ValueError(
                    f"{name}={slots} must be a multiple of mesh.context={parts}, over which the "
                    "tokens of a row are cut"
                )

    def _check_forks(self, forks: ForksConfig) -> None:
        """Raises ConfigError where no episode has a turn border to be forked at."""
        if self.harness is not None:
            raise ConfigError(
                f"config.rollout.forks with config.harness = {self.harness.name!r}: the state of "
                "an agent of others cannot be copied; leave one of the two out"
            )
        if self.summaries is not None:
            raise ConfigError(
                "config.rollout.forks: borders are counted in one context, and config.summaries "
                "begins further ones; leave one of the two out"
            )
        if not forks.most(self.limits.turns, self.train.group_size):
            raise ConfigError(
                f"config.rollout.forks: every={forks.every} chooses no border of episodes with "
                f"limits.turns={self.limits.turns}; there are {self.limits.turns - 1} borders"
            )

    def _check_picks(self) -> None:
        """Raises ConfigError where nothing can be noted or replayed."""
        picks = self.rollout.picks
        if picks is None:
            return
        methods = self.model.known_methods()
        if methods and self.model.preset:  # else the weights tell it, and ``run`` asks them
            check_chooses(methods, self.model.shape().moe, picks)
        if self.train.pack.prompt_slots:
            raise ConfigError(
                f"config.rollout.picks = {picks!r}: an update in two phases "
                f"(train.pack.prompt_slots={self.train.pack.prompt_slots}) cannot use picks; leave "
                "one of the two out"
            )

    def _check_adapters(self) -> None:
        """Raises ConfigError for what trains parameters that are frozen beside adapters."""
        if self.model.change_methods:
            raise ConfigError(
                "config.model.change_methods = True begins parameters that have to be trained, and "
                "config.model.lora trains adapters alone: train the methods first, in a run of "
                "their own"
            )
        if self.model.balance_rate:
            raise ConfigError(
                f"config.model.balance_rate = {self.model.balance_rate} moves biases of experts, "
                "which config.model.lora freezes; set it to 0"
            )
        for name, optimizer in self.optimizers().items():
            if optimizer.muon_learning_rate is not None:
                raise ConfigError(
                    f"config.{name}.optimizer.muon_learning_rate = "
                    f"{optimizer.muon_learning_rate}: Muon is for whole matrices, not for the "
                    "adapters of config.model.lora; set it to None"
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


def check_rows(config: RunConfig, shards: int) -> None:
    """Raises ConfigError if the rows of a micro-batch cannot be shared out equally.

    shards: over how many devices they are cut.
    """
    batches = {"train": (config.train.pack.rows, config.train.micro_batches, "train.pack.rows")}
    if config.sft is not None:
        batches["sft"] = (config.sft.rows, config.sft.micro_batches, "sft.rows")
    for name, (rows, parts, key) in batches.items():
        if rows // parts % shards:
            raise ConfigError(
                f"config.{key} = {rows} with {name}.micro_batches = {parts}: the {rows // parts} "
                f"rows of a micro-batch do not divide by the {shards} devices over which "
                "config.mesh cuts rows (data x fsdp x expert)"
            )


def check_chooses(methods: Sequence[Method], moe: MoE | None, picks: str | None) -> None:
    """Raises ConfigError if picks are asked for and no layer's can be noted."""
    if picks is not None and choosing(methods) is None and moe is None:
        names = ", ".join(dict.fromkeys(type(method).__name__ for method in methods))
        raise ConfigError(
            f"config.rollout.picks = {picks!r}: no layer has attention whose picks can be noted "
            f"(nsa), and none has experts; the model's are {names}; set rollout.picks to None"
        )


def refuse_sync(config: RunConfig) -> None:
    """Raises ConfigError if a learner and actors in processes of their own cannot run a config."""
    if config.asynchrony.mode == "sync":
        raise ConfigError(
            "asynchrony.mode = 'sync': a learner and actors in processes of their own need "
            "'one_step' or 'in_flight'"
        )


def check_prefill(config: RunConfig) -> PrefillConfig:
    """The section of the role prefill. Raises ConfigError if a config has none, or no other roles
    in processes of their own.
    """
    if config.rollout.prefill is None:
        raise ConfigError(
            "config.rollout.prefill = None: without this section actors prefill by themselves, and "
            "a process of the role prefill has nothing to do; set it to {}"
        )
    refuse_sync(config)
    return config.rollout.prefill


def meshes(config: RunConfig, role: str = "all") -> list[MeshConfig]:
    """The meshes of a process in the order in which they take devices: of learning, of sampling,
    of prefill. A mesh that the role does not use is left out.
    """
    rollout = config.rollout
    if role == "prefill":
        return [check_prefill(config).mesh]
    sampling = [rollout.mesh] if role == "actor" or (role == "all" and rollout.apart) else []
    prefill = [rollout.prefill_mesh] if rollout.prefill_mesh and role != "learner" else []
    return [config.mesh] * (role != "actor") + sampling + prefill
