"""Whole config of a run: its sections, and the checks that they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.families import PRESETS
from models.sharding import MeshConfig
from rl_code.config.read_config import ConfigError
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation import during
from rl_code.harness.api import find_agent
from rl_code.rewards.combine import find_signals
from rl_code.rollout.prefill_wire import PrefillConfig
from rl_code.run import agreement
from rl_code.run.derive import settle
from rl_code.run.keys import RunKeys
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import check_demonstrable


@dataclasses.dataclass(frozen=True)
class RunConfig(RunKeys):
    """Everything a run needs.

    A key that the config's file leaves out has its default, or a value that follows from other keys
    (``derive.settle``). A RunConfig is therefore always complete.
    """

    def __post_init__(self):
        self._check_names()
        for name, section in settle(self).items():
            object.__setattr__(self, name, section)
        agreement.check(self)

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
            agreement.check_demonstrations(self, protocol, tools)
        if self.sft is not None:
            path, named = self.demonstrated()
            ways = find_source(named, f"config.{path}").demonstrated
            agent = self.harness and find_agent(self.harness, "config.harness")
            check_demonstrable(protocol, tools, ways, agent)
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
            agreement.check_harness(self, self.harness)
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


def refuse_sync(config: RunConfig) -> None:
    """Raises ConfigError if a learner and actors in processes of their own cannot run a config."""
    if config.asynchrony.mode == "sync":
        raise ConfigError(
            "asynchrony.mode = 'sync': a learner and actors in processes of their own need "
            "'one_step' or 'in_flight'"
        )


def refuse_other_documents(
    documents: DocumentsConfig | None, kept: Mapping[str, Any], what: str
) -> None:
    """Raises ConfigError where weights were trained with other documents than they are served with:
    they would read them by another mask and other positions.

    documents: of the config that serves. kept: the config of the run that trained, as its workdir
    keeps it. what: names that run.
    """
    own = None if documents is None else dataclasses.asdict(documents)
    there = kept.get("documents")
    if there is not None:
        there = {**there, "page": kept.get("rollout", {}).get("engine", {}).get("page")}
    if own != there:
        raise ConfigError(
            f"{what} has documents={there}, and the config that serves has documents={own}: the "
            "model would read contexts by another mask than it was trained with; serve it by its "
            "own config"
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
