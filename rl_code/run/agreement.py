"""Agreement of the sections of a run's config: what contradicts each other is refused before a run
starts, with the keys and what to set instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attention.methods.method import Method
from attention.picks import choosing
from models.model_config import MoE
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, refuse
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.summaries import SummariesConfig, longest_context
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.tool import Tool
from rl_code.harness.api import find_agent
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.process_credit import ProcessCredit
from rl_code.rollout.forks_config import ForksConfig
from rl_code.run import vllm
from rl_code.run.derive import longest_wait_s
from rl_code.run.keys import RunKeys
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import check_demonstrable


def check(config: RunKeys) -> None:
    """Raises ValueError where sections contradict each other, which none of them can see."""
    train = config.train
    path, named = config.demonstrated()
    demonstrated = find_source(named, f"config.{path}").demonstrated
    if config.tokenizer.source == "train" and not demonstrated:
        raise ValueError(
            f"tokenizer.source='train' trains on demonstrations, which {path}.name="
            f"{named.name!r} lacks"
        )
    if config.sft is not None and not demonstrated:
        raise ValueError(
            f"sft trains on demonstrations, which {path}.name={named.name!r} lacks; leave it out"
        )
    _check_limits(config)
    if config.documents is not None:
        _check_documents(config, config.documents)
    elif config.serving.documents_mb is not None:
        raise ValueError(
            f"serving.documents_mb={config.serving.documents_mb} keeps documents, and the config "
            "has no section documents; set it to None"
        )
    _check_milestones(config)
    if config.summaries is not None:
        _check_summaries(config, config.summaries)
    if config.memory.left_out:
        _check_left_out(config)
    _check_picks(config)
    if config.rollout.forks is not None:
        _check_forks(config, config.rollout.forks)
    elif train.continuations or train.advantage.name == "monte_carlo":
        key = "continuations" if train.continuations else "advantage"
        value = train.continuations or train.advantage.name
        raise ConfigError(
            f"config.train.{key} = {value!r} needs continuations, and "
            "config.rollout.forks = None samples none; set it to {} or to settings of its own"
        )
    if train.advantage.name == "process":
        _check_process(config, train.advantage)
    check_states(config, config.model.known_methods())
    if config.mesh.context not in (None, 1):
        _check_context(config, config.mesh.context)
    if config.model.lora is not None:
        _check_adapters(config)
    if train.teacher is not None:
        _check_teacher(config, train.teacher)
    _check_updates(config)
    vllm.check(config)


def _check_limits(config: RunKeys) -> None:
    """Raises ValueError where an episode of training or of a suite finds no room, or no time."""
    played = [("", config.limits, "rollout.engine", config.rollout.engine)]
    for at, suite in enumerate(config.suites):
        name = f"suites[{at}]."
        shapes = suite.engine or config.rollout.engine
        played.append((name, suite.limits or config.limits, f"{name}engine", shapes))
    for name, limits, engine, shapes in played:
        longest_s = longest_wait_s(config, limits)
        if config.rollout.worker_deadline_s <= longest_s:
            raise ValueError(
                f"rollout.worker_deadline_s={config.rollout.worker_deadline_s:g} must be above "
                f"the {longest_s:g} s that {name}limits lets tools and grading "
                "take; a model that waits would end the run"
            )
        longest = longest_context(config.summaries, limits)
        if longest > shapes.length:
            key = f"{name}limits.tokens={limits.tokens}"
            if longest < limits.tokens:
                key = f"summaries.context={longest}"
            raise ValueError(f"{key} must not exceed {engine}.length={shapes.length}")


def _check_updates(config: RunKeys) -> None:
    """Raises ValueError for updates that cannot be made as asked, or would lose what they ask."""
    train = config.train
    if train.pack.prompt_slots and config.model.offload_activations:
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
    if train.pack.rows % train.micro_batches:
        raise ValueError(
            f"train.pack.rows={train.pack.rows} must divide into "
            f"train.micro_batches={train.micro_batches}"
        )


def _check_teacher(config: RunKeys, teacher: TeacherConfig) -> None:
    """Raises ConfigError where a teacher does not go with other sections."""
    if config.train.pack.drop_uninformative:
        raise ConfigError(
            "config.train.pack.drop_uninformative = True drops groups of equal rewards, which "
            "config.train.teacher would teach: set it to False"
        )
    if teacher.feedback is None:
        return
    name = f"config.train.teacher.feedback = {teacher.feedback.name!r}"
    if config.documents is not None:
        raise ConfigError(
            f"{name}: documents have other places behind it; leave one of the two out"
        )
    if config.harness is not None:
        raise ConfigError(
            f"{name}: an agent of others ({config.harness.name!r}) writes its prompts by itself, "
            "so none can be made with feedback; leave it out"
        )


def check_demonstrations(config: RunKeys, protocol: Protocol, tools: Mapping[str, Tool]) -> None:
    """Raises ConfigError where groups cannot hold demonstrations."""
    path = "config.train.demonstrations"
    ways = find_source(config.tasks, "config.tasks").demonstrated
    if not ways:
        raise ConfigError(f"{path}: the tasks of {config.tasks.name!r} have none; leave it out")
    if config.harness is not None:
        raise ConfigError(
            f"{path}: what {config.harness.name!r} asks for is not known before; leave "
            "demonstrations out, or harness"
        )
    if config.rollout.forks is not None:
        raise ConfigError(
            f"{path}: nothing goes on from the turns of a demonstration; leave demonstrations "
            "out, or rollout.forks"
        )
    if config.rollout.picks is not None:
        raise ConfigError(
            f"{path}: no sampler notes picks of demonstrations; set rollout.picks to None"
        )
    try:
        check_demonstrable(protocol, tools, ways)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_milestones(config: RunKeys) -> None:
    """Raises ConfigError where milestones are not measured, or cannot be."""
    if config.milestones is None:
        if config.train.advantage.name == "milestones":
            raise ConfigError(
                "config.train.advantage = 'milestones': none are measured; set config.milestones={}"
            )
        return
    if config.harness is not None:
        raise ConfigError(
            f"config.milestones: the files of {config.harness.name!r} are not looked at between "
            "its messages; leave milestones out, or harness"
        )
    tools = find_tools(config.tools, "config.tools")
    if asking := [name for name, tool in tools.items() if tool.delegation is not None]:
        raise ConfigError(
            f"config.milestones: messages of sub-agents ({', '.join(asking)}) have none; leave "
            "milestones out, or these tools"
        )


def _check_summaries(config: RunKeys, summaries: SummariesConfig) -> None:
    """Raises ConfigError for limits of training in which no summary could be asked for."""
    longest = summaries.longest(config.limits)
    if config.limits.turns < 2:
        raise ConfigError(
            f"config.limits.turns = {config.limits.turns}: a summary is asked for between two "
            "messages; allow more of them, or leave summaries out"
        )
    if summaries.trigger + summaries.tokens > longest:
        raise ConfigError(
            f"config.summaries.trigger = {summaries.trigger}: with summaries of "
            f"{summaries.tokens} tokens it must be at most {longest - summaries.tokens}, since "
            f"a context has at most {longest} tokens"
        )


def _check_left_out(config: RunKeys) -> None:
    """Raises ConfigError where the worth of a note could not be told, or not be trained."""
    key = f"config.memory.left_out = {config.memory.left_out}"
    if config.memory.left_out >= config.train.group_size:
        raise ConfigError(
            f"{key}: it must be less than train.group_size = {config.train.group_size}, since "
            "some episodes of a group must read the note"
        )
    if config.train.pack.prompt_slots:
        raise ConfigError(
            f"{key}: an update in two phases (train.pack.prompt_slots="
            f"{config.train.pack.prompt_slots}) begins before it is known which stores are "
            "credited; leave one of the two out"
        )
    if config.harness is not None:
        raise ConfigError(f"{key}: an agent of others stores no notes; set it to 0")
    beside = {
        "train.value": config.train.value,
        "train.teacher": config.train.teacher,
        "train.demonstrations": config.train.demonstrations,
        "rollout.forks": config.rollout.forks,
    }
    if used := [name for name, section in beside.items() if section is not None]:
        raise ConfigError(
            f"{key}: the episodes of a group that read the note are compared with those that "
            f"do not, without {used[0]}; leave one of the two out"
        )


def check_harness(config: RunKeys, harness: Named) -> None:
    """Raises ConfigError for what an agent of others cannot be played with."""
    find_agent(harness, "config.harness")
    name = f"config.harness = {harness.name!r}"
    if config.summaries is not None:
        raise ConfigError(
            f"{name}: an agent of others decides itself when to sum up; leave summaries out"
        )
    if config.documents is not None:
        raise ConfigError(f"{name}: agents of others write no documents; leave documents out")
    if config.rollout.picks is not None:
        raise ConfigError(
            f"{name}: picks are not noted for its trees of contexts; set rollout.picks to None"
        )
    tools = find_tools(config.tools, "config.tools")
    if not find_protocol(config.protocol, tools, "config.protocol").converses:
        raise ConfigError(
            f"{name}: the protocol {config.protocol.name!r} has no place for conversations; take "
            "a chat, such as 'hermes', or 'compact'"
        )


def _check_context(config: RunKeys, parts: int) -> None:
    """Raises ValueError where rows cannot be cut over the axis context."""
    pack = config.train.pack
    rows = {"train.pack.slots": pack.slots, "train.pack.prompt_slots": pack.prompt_slots}
    if config.train.teacher is not None:
        rows["train.teacher.slots"] = config.train.teacher.slots
    if config.sft is not None:
        rows["sft.slots"] = config.sft.slots
    for name, slots in rows.items():
        if slots % parts:
            raise ValueError(
                f"{name}={slots} must be a multiple of mesh.context={parts}, over which the "
                "tokens of a row are cut"
            )


def _check_forks(config: RunKeys, forks: ForksConfig) -> None:
    """Raises ConfigError where no episode has a turn border to be forked at."""
    if config.harness is not None:
        raise ConfigError(
            f"config.rollout.forks with config.harness = {config.harness.name!r}: the state of "
            "an agent of others cannot be copied; leave one of the two out"
        )
    if config.summaries is not None:
        raise ConfigError(
            "config.rollout.forks: borders are counted in one context, and config.summaries "
            "begins further ones; leave one of the two out"
        )
    if not forks.most(config.limits.turns, config.train.group_size):
        raise ConfigError(
            f"config.rollout.forks: every={forks.every} chooses no border of episodes with "
            f"limits.turns={config.limits.turns}; there are {config.limits.turns - 1} borders"
        )


def _check_process(config: RunKeys, advantage: Named) -> None:
    """Raises ConfigError where no signal pays at turns, so that nothing of the process counts."""
    component = advantage.settings.get("component", ProcessCredit.component)
    active = [signal.component for signal in config.reward.signals]
    if component not in active:
        raise ConfigError(
            f"config.train.advantage = 'process' credits turns with what {component!r} pays, and "
            f"config.reward.signals has {active}; add that signal, or take another advantage"
        )


def _check_picks(config: RunKeys) -> None:
    """Raises ConfigError where nothing can be noted or replayed."""
    picks = config.rollout.picks
    if picks is None:
        return
    methods = config.model.known_methods()
    if methods and config.model.preset:  # else the weights tell it, and ``run`` asks them
        check_chooses(methods, config.model.shape().moe, picks)
    if config.train.pack.prompt_slots:
        raise ConfigError(
            f"config.rollout.picks = {picks!r}: an update in two phases "
            f"(train.pack.prompt_slots={config.train.pack.prompt_slots}) cannot use picks; leave "
            "one of the two out"
        )


def _check_adapters(config: RunKeys) -> None:
    """Raises ConfigError for what trains parameters that are frozen beside adapters."""
    if config.model.change_methods:
        raise ConfigError(
            "config.model.change_methods = True begins parameters that have to be trained, and "
            "config.model.lora trains adapters alone: train the methods first, in a run of "
            "their own"
        )
    if config.model.balance_rate:
        raise ConfigError(
            f"config.model.balance_rate = {config.model.balance_rate} moves biases of experts, "
            "which config.model.lora freezes; set it to 0"
        )
    for name, optimizer in config.optimizers().items():
        if optimizer.muon_learning_rate is not None:
            raise ConfigError(
                f"config.{name}.optimizer.muon_learning_rate = "
                f"{optimizer.muon_learning_rate}: Muon is for whole matrices, not for the "
                "adapters of config.model.lora; set it to None"
            )


def _check_documents(config: RunKeys, documents: DocumentsConfig) -> None:
    """Raises ValueError where documents do not agree with other sections."""
    documents.check_page()
    if documents.longest > config.limits.tokens:
        raise ValueError(
            f"documents.longest={documents.longest} must not exceed "
            f"limits.tokens={config.limits.tokens}"
        )
    if config.train.pack.prompt_slots:
        raise ValueError(
            f"train.pack.prompt_slots={config.train.pack.prompt_slots} means two phases, which "
            "are not for documents: leave one of the two out"
        )
    for at, suite in enumerate(config.suites):
        if suite.engine is not None and suite.engine.page != documents.page:
            raise ValueError(
                f"suites[{at}].engine.page={suite.engine.page} must be "
                f"rollout.engine.page={documents.page}: documents fill the same pages in "
                "evaluations"
            )


def check_states(config: RunKeys, methods: Sequence[Method]) -> None:
    """Raises ConfigError for settings that layers with projections of their own do not have.

    methods: of the model's layers.
    """
    own = [method for method in methods if method.mixes]
    if not own:
        return
    train, model = config.train, config.model
    engines = {"rollout": config.rollout.engine}
    engines |= {f"suites[{at}]": suite.engine for at, suite in enumerate(config.suites)}
    drafts = {
        f"{name}.engine.draft_tokens": (engine.draft_tokens, 0)
        for name, engine in engines.items()
        if engine is not None
    }
    # each key, its value, and the values that it may have
    refused = {
        "train.pack.prompt_slots": (train.pack.prompt_slots, 0),
        "model.lora": (model.lora, None),
        "model.pad_for": (model.pad_for, None),
    }
    refuse(refused, f"beside {type(own[0]).__name__}, which has projections of its own")
    indexers = [method for method in own if method.indexes]
    if indexers and config.documents is not None:
        # its tokens stand at other orders than at places of pages, which documents fill up
        refused = {"rollout.picks": (config.rollout.picks, None)}
        refuse(refused, f"beside documents, where {type(indexers[0]).__name__} chooses tokens")
    states = [method for method in own if method.keeps_state]
    if not states:
        return
    refused = {
        "documents": (config.documents, None),
        **drafts,
        "rollout.weights": (config.rollout.weights, None),
    }
    refuse(refused, f"beside layers that keep a state, as {type(states[0]).__name__} does")
    if not train.pack.runs:
        raise ConfigError(
            f"config.train.pack.runs = 0: {type(states[0]).__name__} keeps a state, so a row must "
            "have a bound on its runs; set it, or name the model's shape by config.model.preset"
        )


def check_chooses(methods: Sequence[Method], moe: MoE | None, picks: str | None) -> None:
    """Raises ConfigError if picks are asked for and no layer's can be noted."""
    if picks is not None and choosing(methods) is None and moe is None:
        names = ", ".join(dict.fromkeys(type(method).__name__ for method in methods))
        raise ConfigError(
            f"config.rollout.picks = {picks!r}: no layer has attention whose picks can be noted "
            f"(nsa, dsa), and none has experts; the model's are {names}; set rollout.picks to None"
        )
    choose = [method for method in methods if method.noted_picks() is not None]
    if picks is not None and len({method.pick_lists(2) for method in choose}) > 1:
        names = " and ".join(dict.fromkeys(type(method).__name__ for method in choose))
        raise ConfigError(
            f"config.rollout.picks = {picks!r}: {names} have different numbers of picks for a "
            "token, which cannot be noted together; set rollout.picks to None"
        )
