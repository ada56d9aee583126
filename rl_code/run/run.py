"""Parts of a run that training, evaluation and warm start share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import families
from models.model_config import ModelConfig
from models.padding import cut_config, pad
from models.paged import model_cache
from models.sharding import make_mesh, parameter_shardings, partition_spec
from models.transformer import Transformer, abstract_model, cast
from rl_code.checkpoint import checkpoint
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.asked import Asked
from rl_code.environment.episode import Episode
from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation.suite import SuiteResult, from_groups
from rl_code.evaluation.suites import SuiteConfig
from rl_code.harness.agent import Agent
from rl_code.harness.api import find_agent
from rl_code.learner import offload
from rl_code.rewards.combine import find_reward
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.multihost import Channel, LeadingEngine
from rl_code.rollout.playing import Playing
from rl_code.rollout.prefill_client import PrefillClient
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.vllm_scheduler import VllmScheduler
from rl_code.run import origin as origin_lib
from rl_code.run import teacher, trajectory_log, vllm
from rl_code.run.asking import ask
from rl_code.run.attention_calls import log_attention
from rl_code.run.config import RunConfig, meshes
from rl_code.run.demonstrations import DemonstrationSource
from rl_code.run.model import find_model_config, find_tokenizer, with_given_adapters
from rl_code.run.task_sets import TaskSets
from rl_code.run.wording import Wording
from rl_code.types import Limits, Reward, Task, Trajectory
from rl_code.weights.layout import sampling_model

if TYPE_CHECKING:
    from rl_code.harness.harness import Harness


def no_checkpoint(workdir: str | os.PathLike[str]) -> str:
    """The words for a workdir whose weights are asked for before it has any."""
    return f"{workdir} has no checkpoint; without --workdir the untrained model is taken"


class Run:
    """The parts of a run, built once. A context manager: leaving it ends the sandboxes and worker
    threads.

    Args:
      role: the role of this process: "all", "learner", "actor" or "prefill".
      channel: connects the processes of an actor that has several.

    The attribute ``mesh`` has the devices that learn, ``rollout_mesh`` those that sample, and
    ``prefill_mesh`` those that prefill prompts, or None if the devices that sample do that. The
    tasks are in ``task_sets``, their prompts and protocols in ``wording``, and what is shown of
    them in ``demonstrations``.
    """

    def __init__(
        self, config: RunConfig, workdir: Path, role: str = "all", channel: Channel | None = None
    ):
        self.config, self.workdir, self.role, self._channel = config, workdir, role, channel
        if jax.process_count() > 1:
            self._check_several_processes()
        # Each mesh takes its devices from the front of the list; the next one gets the rest.
        devices = jax.devices()
        made = []
        for mesh in meshes(config, role):
            try:
                made.append(make_mesh(mesh, devices))
            except ValueError as error:
                raise ConfigError(f"config.mesh or config.rollout.mesh: {error}") from error
            devices = devices[made[-1].size :]
        self.prefill_mesh = (
            made.pop() if config.rollout.prefill_mesh and role in ("all", "actor") else None
        )
        self.mesh = made[0]
        self.rollout_mesh = made[-1]
        if role in ("all", "learner"):
            self._check_offload()
            for key in config.train.without_effect():
                told = "config.%s does nothing: with config.train.epochs = 1 every ratio is 1"
                logging.warning(told, key)
        self.rows_sharding = NamedSharding(self.mesh, partition_spec(("batch",)))
        # Names in the config are looked up before sandboxes are started.
        self._pay = find_reward(config.reward)
        # (group, index) -> notes of an episode that is played again
        self._recorded: dict[tuple[int, int], Mapping[str, Any]] = {}
        self.origin = origin_lib.find(config.model.weights)
        self.tools = find_tools(config.tools)
        agent = config.harness and find_agent(config.harness, "config.harness")
        # Plays the episodes where an agent of others does; None for our own.
        self.harness = _start(agent) if agent else None
        self.pool = SandboxPool(config.sandbox)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self.pool.close)
            self.task_sets = TaskSets(config, self.pool, workdir, self._prompt_tokens)
            self.demonstrations = DemonstrationSource(config, self.tools, agent, self.task_sets)
            shown = self.demonstrations.numbered
            self.tokenizer = find_tokenizer(config, self.origin, workdir, shown)
            self.model_config = find_model_config(config, self.origin, self.tokenizer)
            self.wording = Wording(config, self.tools, self.tokenizer)
            self.wording.stop_ids()  # whether the protocol goes with the tokenizer
            log_attention(config, self.model_config, role=role)
            if role in ("all", "learner"):  # others have no teacher
                teacher.check(config, self.origin, self.model_config, self.tokenizer)
            unless_made.pop_all()
        self._schedulers: dict[tuple, Scheduler] = {}  # by the way they sample
        self._vllm: VllmScheduler | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandboxes and worker threads."""
        for scheduler in self._schedulers.values():
            scheduler.close()
        if self._vllm is not None:
            self._vllm.close()
        if self.harness is not None:
            self.harness.close()
        self.pool.close()

    def _check_offload(self) -> None:
        key = self.config.offloaded()
        if key is None:
            return
        device = self.mesh.devices.flat[0]
        if not offload.has_host_memory(device):
            raise ConfigError(
                f"config.{key} = True: {device.device_kind} has no memory of the kind "
                f"{offload.KIND!r}; set it to False"
            )
        if device.platform == "cpu":
            logging.warning(
                "config.%s = True saves nothing on CPU, whose memory is the host's, and has ended "
                "processes there",
                key,
            )

    def _check_several_processes(self) -> None:
        if self.role == "all":
            raise ConfigError(
                f"role 'all' in {jax.process_count()} processes: start a learner and actors apart"
            )
        rollout = self.config.rollout
        if self.role == "actor" and rollout.engine.name == "vllm":
            raise ConfigError(
                f"rollout.engine.name='vllm': an actor in {jax.process_count()} processes; run it "
                "in one, with a server of its own"
            )
        if self.role == "prefill" or (self.role == "actor" and rollout.prefill is not None):
            raise ConfigError(
                f"rollout.prefill: the role {self.role} in {jax.process_count()} processes; pages "
                "go from one process to one process: run the role prefill and each actor in one, "
                "or set it to None"
            )
        if self.role == "actor" and rollout.engine.host_pages_mb is not None:
            raise ConfigError(
                f"rollout.engine.host_pages_mb={rollout.engine.host_pages_mb}: an actor in "
                f"{jax.process_count()} processes keeps no pages on the host; set it to None"
            )
        if self.role == "actor" and self.config.rollout.prefill_mesh:
            raise ConfigError(
                f"rollout.prefill_mesh={self.config.rollout.prefill_mesh}: an actor in "
                f"{jax.process_count()} processes "
                "prefills where rows decode; set it to None"
            )
        if self.role == "learner" and self.config.suites:
            raise ConfigError(
                f"suites = {[suite.name for suite in self.config.suites]}: a learner in "
                f"{jax.process_count()} "
                "processes plays none; set suites=() and use launch.evaluate on its checkpoints"
            )

    @functools.cached_property
    def journal(self) -> Path:
        """The folder into which this process writes metrics and logs. It is made when it is first
        asked for, so that a run which cannot be built leaves nothing behind.
        """
        index = jax.process_index()
        folder = self.workdir / f"process_{index}" if index else self.workdir
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def saved_model(
        self, workdir: str | os.PathLike[str], step: int | None = None
    ) -> tuple[Transformer, int]:
        """The weights of a checkpoint, and its step; the newest one unless a step is named.

        Raises ConfigError for a workdir without a checkpoint, and CheckpointError for a step that
        it does not have or that cannot be read.
        """
        model = abstract_model(self.model_config, self.mesh)
        restored = checkpoint.load(workdir, {"model": model}, step=step, partial=True)
        if restored is None:
            raise ConfigError(no_checkpoint(workdir))
        return restored.state["model"], restored.step

    def init_model(self) -> Transformer:
        """The model a run starts from, laid out over the mesh: random, or the configured
        weights, with the configured adapters. What belongs to it goes into the workdir.
        """
        if jax.process_index() == 0 and self.role in ("all", "learner"):
            self._keep_model()
        config = self.config
        if self.origin.files is None:
            model = make_random_model(self.model_config, self.mesh, config.seed)()
        else:
            change = config.model.change_methods
            model = self.origin.load(self.model_config, self.mesh, change, config.seed)
        return with_given_adapters(config, model, self.mesh)

    def _keep_model(self) -> None:
        """Puts the model's config, tokenizer and template into the workdir."""
        family = families.of_protocol(self.config.protocol.name)
        documents = self.config.documents
        origin_lib.keep(
            self.workdir,
            self.origin,
            cut_config(self.model_config),
            self.tokenizer,
            # outside of documents positions count from the longest document
            max_positions=self.config.limits.tokens + (documents.longest if documents else 0),
            stop_ids=self.wording.stop_ids(),
            chat_template=family.template if family else None,
            own_tokenizer=not self.config.tokenizer.path,
        )

    def sampler(self, model: Transformer, dtype: str | None = None) -> Transformer:
        """The copy of a model that samples: in the rollout's dtype and with its quantised matrices,
        or in another dtype with none.
        """
        rollout = self.config.rollout
        if dtype is None:
            model = cast(model, rollout.dtype, rollout.weights)
        else:
            model = cast(model, dtype)
        if self.rollout_mesh == self.mesh:
            return model
        with jax.set_mesh(self.rollout_mesh):
            return jax.device_put(model, parameter_shardings(model, self.rollout_mesh))

    def sampling_model(self) -> Transformer:
        """The abstract model that actors of this process sample with."""
        rollout = self.config.rollout
        return sampling_model(self.model_config, rollout.dtype, self.rollout_mesh, rollout.weights)

    def episode(
        self,
        task: Task,
        group: int,
        index: int,
        *,
        protocol: Named | None = None,
        limits: Limits | None = None,
        on_work: Callable[[Task, int, Snapshot | None], None] | None = None,
        for_training: bool = True,
    ) -> Episode:
        """A new episode of a task, by the protocol and limits of training unless others are
        given. on_work: gets what the agent hands in. for_training: False for one of a suite, of
        which no milestones are needed, and which leaves no notes and is not asked for any.
        """
        if self.harness is not None:
            from rl_code.harness.episode import AgentEpisode

            return AgentEpisode(
                task,
                group=group,
                index=index,
                protocol=self.wording.protocol(protocol),
                tokenizer=self.tokenizer,
                pool=self.pool,
                limits=limits or self.config.limits,
                reward=self._reward,
                harness=self.harness,
                on_work=on_work,
            )
        return Episode(
            task,
            group=group,
            index=index,
            protocol=self.wording.protocol(protocol),
            tools=self.tools,
            tokenizer=self.tokenizer,
            pool=self.pool,
            limits=limits or self.config.limits,
            reward=self._reward,
            asked=Asked(
                documents=self.config.documents,
                summaries=self.config.summaries,
                closing=self.config.memory.found().closing if for_training else None,
                milestones=self.config.milestones if for_training else None,
                test_errors=teacher.reads_test_errors(self.config.train),
            ),
            prompt=self.wording.encoded(task, protocol),
            on_work=on_work,
        )

    def recall(self, trajectories: Sequence[Trajectory]) -> None:
        """Notes on record (``Reward.notes``) that episodes of these groups and indices are paid by
        from now on, where they come to ask the same of somebody else again.
        """
        for one in trajectories:
            self._recorded[one.group, one.index] = one.reward.notes or {}

    def _reward(self, episode: FinishedEpisode) -> Reward:
        """Pays an episode, as ``find_reward``."""
        trajectory = episode.trajectory
        recorded = self._recorded.get((trajectory.group, trajectory.index), {})
        mesh, schedulers = self.rollout_mesh, self._schedulers.values()
        policy = functools.partial(ask, schedulers, self.tokenizer, mesh, trajectory)
        if self.config.rollout.engine.name == "vllm":
            policy = None  # schedulers of suites have other weights
        return self._pay(
            dataclasses.replace(episode, workdir=self.workdir, policy=policy, recorded=recorded)
        )

    def player(self, remote: Callable[[Engine], PrefillClient] | None = None) -> Playing:
        """Player of the episodes of training, by ``rollout.engine``. remote: as of ``scheduler``.

        Raises ConfigError, and VllmError where a server cannot be reached.
        """
        if self.config.rollout.engine.name == "own":
            return self.scheduler(self.config.rollout.sampling, remote=remote)
        if self._vllm is None:
            made = self.tokenizer, sorted(self.wording.stop_ids()), self.workdir, self.journal
            self._vllm = vllm.connect(self.config, self.model_config, *made)
        return self._vllm

    def scheduler(
        self,
        sampling: SamplingConfig,
        engine: EngineConfig | None = None,
        protocol: Named | None = None,
        dtype: str | None = None,
        *,
        beside_actor: bool = False,
        remote: Callable[[Engine], PrefillClient] | None = None,
    ) -> Scheduler:
        """The Scheduler that samples this way; its programs are compiled once per way.

        beside_actor: another one than that of an actor of this process, which may be sampling.
        remote: makes what asks another process for pages, for the engine of a new Scheduler.
        """
        rollout = self.config.rollout
        engine = engine or rollout.engine
        dtype = dtype or rollout.dtype
        way = engine, protocol or self.config.protocol, dtype
        # Protocols that end messages alike share the programs.
        key = sampling, engine, self.wording.stop_ids(protocol), dtype, beside_actor
        if key not in self._schedulers:
            made = self.engine(sampling, *way, self.rollout_mesh)
            self._schedulers[key] = Scheduler(
                made,
                self.tokenizer,
                workers=rollout.workers,
                worker_deadline_s=rollout.worker_deadline_s,
                gather_s=rollout.gather_s,
                prefiller=self.engine(sampling, *way, self.prefill_mesh)
                if self.prefill_mesh
                else None,
                remote=remote(made) if remote else None,
            )
        return self._schedulers[key]

    def engine(
        self,
        sampling: SamplingConfig,
        config: EngineConfig,
        protocol: Named,
        dtype: str,
        mesh: Mesh,
    ) -> Engine:
        """A new Engine. In the first process of an actor that has several, it is one whose calls
        the other processes follow.
        """
        model_config = dataclasses.replace(self.model_config, dtype=dtype, param_dtype=dtype)
        if config.pages_mb is not None:
            sizes = dict(page=config.page, undone=config.undone)
            make = functools.partial(model_cache, model_config, 1, config.cache_dtype, **sizes)
            leaves = jax.tree.leaves(jax.eval_shape(make))
            try:
                config = config.within_memory(sum(x.size * x.dtype.itemsize for x in leaves))
            except ValueError as error:
                raise ConfigError(f"config.rollout.engine: {error}") from error
        stops = tuple(sorted(self.wording.stop_ids(protocol)))
        if self._channel is not None and self._channel.leads:
            return LeadingEngine(model_config, config, sampling, stops, mesh, channel=self._channel)
        return Engine(model_config, config, sampling, stops, mesh)

    def _prompt_tokens(self, task: Task, protocol: Named) -> int:
        return len(self.wording.prompt(task, protocol))

    def evaluate(
        self,
        suite: SuiteConfig,
        model: Transformer,
        *,
        label: str,
        step: int,
        on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
        on_work: Callable[[Task, int, Snapshot | None], None] | None = None,
    ) -> SuiteResult:
        """Plays a suite with these weights. The same weights give the same result.

        on_work: called in any thread with what each episode hands in: the task, the index, and the
        files, or None.
        """
        make_episode = functools.partial(
            self.episode,
            protocol=suite.protocol,
            limits=suite.limits,
            on_work=on_work,
            for_training=False,
        )
        way = suite.sampling, suite.engine, suite.protocol, suite.dtype
        # the same for all evaluations of a run, those before and after training too
        beside = self.config.evaluate is not None and self.config.asynchrony.mode != "sync"
        groups, _ = self.scheduler(*way, beside_actor=beside).rollout(
            self.sampler(model, suite.dtype),
            self.task_sets.of_suite(suite),
            make_episode,
            group_size=suite.samples,
            version=step,
            key=jax.random.key(self.config.seed),
            on_finished=on_finished,
        )
        name = f"{suite.name}.{label}"
        trajectory_log.write_evaluation(self.journal, name, step, groups, self.tokenizer.decode)
        sampling = dataclasses.asdict(suite.sampling)
        return from_groups(suite.name, label, step, sampling, groups)


def make_random_model(config: ModelConfig, mesh: Mesh, seed: int) -> Callable[[], Transformer]:
    """A program that draws a model's parameters, laid out over the mesh."""
    like = abstract_model(config)
    make = functools.partial(Transformer, cut_config(config))
    return jax.jit(
        lambda: pad(make(nnx.Rngs(seed)), like), out_shardings=parameter_shardings(like, mesh)
    )


def _start(agent: Agent) -> Harness:
    """The endpoint that an agent of others asks. Runs without such an agent import no server."""
    from rl_code.harness.harness import Harness

    return Harness(agent)
