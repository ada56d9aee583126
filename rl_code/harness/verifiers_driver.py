"""Calls of the package verifiers 0.4 (see ``verifiers``). It runs in a Python that has the package
and uses nothing else but the standard library.

As a program it reads from standard input which environment is meant, ``{"taskset": ..., "env":
{...}, "select": {...}, "folder": ..., "sandboxed": ...}``, and writes ``{"rows": [...]}`` or
``{"error": ...}``. Episodes are run by ``forking_driver``: they are told the same, ``"index"`` (the
place in the selection), the most ``"turns"``, the folder ``"here"`` that paths are relative to, and
the endpoint. They end with ``{"scores": {...}}``, and ``"error"`` where the environment failed over
what the policy did.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import gc
import importlib
import itertools
import json
import math
import os
import signal
import socket
import sys
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

# The variable in which the package looks for the key of the endpoint. It hides names with API_KEY
# from the programs that it starts.
_KEY = "RL_CODE_EPISODE_API_KEY"
# The folder for what rollouts leave behind.
_FOLDER = "RL_CODE_VERIFIERS_FOLDER"
_PLUGINS = Path(__file__).with_name("in_verifiers")
_IN_PROCESS = "in_process"
# Errors that what the policy says may bring about, once it has said something: those of the code
# of tasks and environments, and the ends of programs.
_PROVOKED = ("TaskError", "EnvError", "HarnessError", "TimeoutError")
# What the endpoint refuses where an episode has reached a limit.
_REFUSED = range(400, 500)
_LONGEST_ERROR = 2000
# Of a task's hash, where it has no name of its own.
_DIGITS = 16
# Seconds in which a server of tools that runs takes a connection.
_CONNECT_S = 5.0


class NoEnvironment(Exception):
    """An environment that cannot be used; the message says why."""


class Package:
    """The parts that are used of verifiers."""

    def __init__(self) -> None:
        version = importlib.import_module("verifiers").__version__
        try:
            self._vf = importlib.import_module("verifiers.v1")
        except ModuleNotFoundError as error:
            if error.name != "verifiers.v1":
                raise
            raise ImportError(
                f"verifiers {version} has no tasksets and harnesses, which came with 0.4"
            ) from error
        # before it has children, each of which would
        for name in ("httpcore", "anyio._backends._asyncio"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        sys.path.append(str(_PLUGINS))
        importlib.import_module("episode_sandbox")
        # programs of harnesses are prepared by the uv that is installed beside the package
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        if _FOLDER in os.environ:
            runtime: Any = importlib.import_module("verifiers.v1.runtimes.subprocess")
            runtime.CACHE_DIR = Path(os.environ[_FOLDER])
        self._loaded: dict[str, tuple[Any, list[Any]]] = {}
        self._keepers: dict[int, Keeper] = {}  # by the id of an environment, which stays loaded
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the servers of tools that were started here."""
        while self._keepers:
            self._keepers.popitem()[1].end()

    def load(self, place: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """The environment and the tasks of its selection, loaded once. Raises NoEnvironment, and
        whatever its own code raises.
        """
        parts = ("taskset", "env", "select", "folder", "sandboxed", "turns")
        key = json.dumps([place.get(part) for part in parts])
        if key not in self._loaded:
            if place["folder"] and place["folder"] not in sys.path:
                sys.path.insert(0, place["folder"])
                os.environ["PYTHONPATH"] = place["folder"]  # for servers of tools
            vf = self._vf
            config = vf.resolve_env_config(self._block(place))
            environment = vf.load_environment(config)
            if place["sandboxed"]:
                self._check(environment)
            taskset = environment.taskset.select(vf.SelectConfig(**place["select"]))
            if not taskset.bounded:
                raise NoEnvironment("its tasks never end: say how many with select.limit")
            tasks = list(taskset)
            if not tasks:
                raise NoEnvironment(f"no task of it is selected by select={place['select']}")
            self._loaded[key] = environment, tasks
        return self._loaded[key]

    def _block(self, place: Mapping[str, Any]) -> dict[str, Any]:
        """The [env] block of the package's configs, with what a role leaves unsaid: the program
        that talks in this process where the taskset brings none, no sandbox of a service, and no
        repetition of an episode, of which the policy has sampled a part already.
        """
        vf = self._vf
        block = copy.deepcopy(dict(place["env"]))
        taskset = block["taskset"] = {**block.get("taskset", {}), "id": place["taskset"]}
        fields = vf.env_config_type(taskset["id"], block.get("id", "")).model_fields
        brings = vf.default_harness_id(taskset["id"]) != "bash"
        for name, field in fields.items():
            declared = field.default
            if not isinstance(declared, vf.AgentConfig):
                continue
            role = block[name] = dict(block.get(name, {}))
            if "harness" not in role and declared.harness is None and not brings:
                role["harness"] = {"id": _IN_PROCESS}
            if "runtime" not in role and "runtime" not in declared.model_fields_set:
                role["runtime"] = {"type": "subprocess"}
            if role.get("max_turns") is None and declared.max_turns is None:
                role["max_turns"] = place.get("turns")
            role["retries"] = {"max_retries": 0}
        block["retries"] = {"max_retries": 0}
        return block

    def _check(self, environment: Any) -> None:
        """Raises NoEnvironment where a program of a role would run the policy's commands on this
        machine, or needs a container that the role has not.
        """
        vf = self._vf
        default = vf.default_agent_harness(environment.config.taskset.id)
        for name, spec in roles_of(environment.config, vf):
            harness = vf.load_harness(spec.harness or default)
            if (
                not isinstance(spec.runtime, vf.SubprocessConfig)
                or harness.config.id == _IN_PROCESS
            ):
                continue
            if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
                raise NoEnvironment(
                    f"the program of its harness {harness.config.id!r} would run the policy's "
                    f"commands on this machine: give env.{name}.runtime=dict(type='docker'), "
                    "'podman' or 'apptainer', or have them run in the episode's sandbox by "
                    f"env.{name}.harness=dict(id='{_IN_PROCESS}', bash=True); sandboxed=False "
                    "lets it"
                )

    def prepare(self, job: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Player of a task."""
        os.chdir(job["here"])
        environment, tasks = self.load(job)
        if job["index"] >= len(tasks):
            raise NoEnvironment(
                f"it had a task {job['index']} when tasks were listed, and has {len(tasks)} now"
            )
        self._share(environment)
        return lambda: asyncio.run(self.play(environment, tasks[job["index"]], job))

    def _share(self, environment: Any) -> None:
        """Has servers of tools that all rollouts share started once, for all episodes, as the
        package does in one process. Those in containers are started for each episode.
        """
        toolsets = environment.taskset.toolsets(environment.taskset.config)
        here = self._vf.SubprocessConfig
        if not toolsets or not all(isinstance(one.config.runtime, here) for one in toolsets):
            return
        keeper = self._keepers.get(id(environment))
        if keeper is not None and not keeper.answers():
            self._keepers.pop(id(environment)).end()
            keeper = None
        if keeper is None:
            keeper = self._keepers[id(environment)] = Keeper(environment)
        environment.shared_tools = keeper.shared_tools

    async def play(self, environment: Any, task: Any, job: Mapping[str, Any]) -> dict[str, Any]:
        """Has the environment play a task by itself."""
        vf = self._vf
        os.environ[_KEY] = job["key"]
        client = vf.EvalClientConfig(base_url=job["base_url"], api_key_var=_KEY)
        context = vf.ModelContext(model=job["model"], client=client)
        if job["sandboxed"]:
            self._use_sandbox(job["base_url"])
        set_up = environment.setup

        async def set_up_and_check(agents: Any) -> None:
            await set_up(agents)
            for name, spec in roles_of(environment.config, vf):
                if spec.client is None and not getattr(agents, name).trainable:
                    raise NoEnvironment(
                        f"its role {name!r} is not to be trained, so the policy does not play "
                        f"it: give it a model of its own, env.{name}.client and env.{name}.model"
                    )

        environment.setup = set_up_and_check
        async with environment.serving():
            return outcome(await environment.run_episode(task, context))

    def _use_sandbox(self, url: str) -> None:
        """Puts the episode's sandbox in the place of rollouts' runtimes of this machine."""
        made = importlib.import_module("episode_sandbox").EpisodeSandbox
        subprocess = self._vf.SubprocessConfig
        rollout: Any = importlib.import_module("verifiers.v1.rollout")
        agent: Any = importlib.import_module("verifiers.v1.agent")
        make, provision = rollout.make_runtime, agent.provision_runtime

        def make_here(config: Any, name: str | None = None) -> Any:
            here = isinstance(config, subprocess)
            return made(url, config, name) if here else make(config, name)

        @contextlib.asynccontextmanager
        async def provision_here(config: Any, *rest: Any) -> AsyncIterator[Any]:
            if not isinstance(config, subprocess):
                async with provision(config, *rest) as runtime:
                    yield runtime
                return
            runtime = made(url, config)
            await runtime.start()
            yield runtime

        # servers of tools keep the package's own: they are no code of the policy's
        rollout.make_runtime, agent.provision_runtime = make_here, provision_here


class Keeper:
    """A child of this process that keeps servers of tools of an environment running.

    Raises whatever starting them raises, as a RuntimeError.
    """

    def __init__(self, environment: Any) -> None:
        self._made = type(environment).shared_tools
        read, write = os.pipe()
        # closed with this process and all that it plays, which ends the child
        watched, self._held = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(read)
            os.close(self._held)
            try:
                asyncio.run(self._keep(environment, write, watched))
            finally:
                os._exit(0)  # whatever comes, it is not to go on as its parent
        os.close(write)
        os.close(watched)
        with os.fdopen(read) as file:
            said = json.loads(file.readline() or '{"error": "it was killed"}')
        if "error" in said:
            self.end()
            raise RuntimeError(f"its servers of tools did not start: {said['error']}")
        self._servers = said

    async def _keep(self, environment: Any, write: int, watched: int) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(watched, ended.set)
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        with os.fdopen(write, "w") as file:
            try:
                async with self._made(environment) as shared:
                    fields = ("url", "local", "external", "state_secret")
                    told = {
                        name: {field: getattr(server, field) for field in fields}
                        for name, server in shared.items()
                    }
                    print(json.dumps(told), file=file, flush=True)
                    await ended.wait()
            except Exception as error:  # of the environment's own code
                print(json.dumps({"error": repr(error)[:_LONGEST_ERROR]}), file=file, flush=True)

    @contextlib.asynccontextmanager
    async def shared_tools(self) -> AsyncIterator[dict[str, Any]]:
        """The servers, in place of the method of the environment."""
        made = importlib.import_module("verifiers.v1.mcp").SharedToolServer
        yield {name: made(**fields) for name, fields in self._servers.items()}

    def answers(self) -> bool:
        """True if all servers that were started here take connections."""
        for server in self._servers.values():
            place = urllib.parse.urlsplit(server["url"])
            if server["external"]:
                continue
            try:
                socket.create_connection((place.hostname, place.port), _CONNECT_S).close()
            except OSError:
                return False
        return True

    def end(self) -> None:
        """Ends the servers, and the child."""
        os.close(self._held)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)


def roles_of(config: Any, vf: Any) -> list[tuple[str, Any]]:
    """The roles of an environment's config, by name."""
    return [(name, value) for name, value in config if isinstance(value, vf.AgentConfig)]


def outcome(episode: Any) -> dict[str, Any]:
    """Rewards and metrics of a played episode, the mean where the policy had several traces.

    An error that the policy can have brought about is told beside the scores so far; any other is
    all that is told.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    scores: dict[str, float] = {}
    parts = [numbers(trace) for trace in traces]
    for name in dict.fromkeys(itertools.chain(*parts)):
        values = [part[name] for part in parts if name in part]
        scores[name] = sum(values) / len(values)
    errors = [*episode.errors, *itertools.chain(*(trace.errors for trace in episode.traces))]
    if episode.ok and traces:
        bad = [name for name, value in scores.items() if not math.isfinite(value)]
        if not bad:
            return {"scores": scores}
        why = f"its {bad[0]} is {scores[bad[0]]!r}, no finite number"
    else:
        if not errors:
            return {"status": "NoTrace", "error": "the policy played no role of its own"}
        error = errors[-1]
        why = f"{error.type}: {error.message}"[:_LONGEST_ERROR]
        spoke = any(trace.num_turns for trace in episode.traces)
        refused = error.type == "ProviderError" and error.status_code in _REFUSED
        if not spoke or not (refused or error.type in _PROVOKED):
            return {"status": error.type, "error": error.message[:_LONGEST_ERROR]}
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    return {"scores": finite, "error": why}


def numbers(trace: Any) -> dict[str, float]:
    """Rewards by name, metrics, and the sum of weighted rewards as "reward"."""
    rewards = {name: one.score for name, one in trace.rewards.items() if one is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**rewards, **metrics, "reward": trace.reward}


def messages(data: Any, content_text: Callable[[Any], str]) -> list[dict[str, str]]:
    """The messages that a task opens with: role and text of each."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None:  # the environment speaks first
        named = data.description or data.name or f"task {data.idx}"
        return [*system, {"role": "user", "content": named}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return system + [
        {"role": one.role, "content": content_text(one.content) or ""} for one in data.prompt
    ]


def listed(package: Package, place: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks of an environment, ``{"rows": [...]}``, or ``{"error": ...}``."""
    try:
        text_of = importlib.import_module("verifiers.v1.types").content_text
        _, tasks = package.load(place)
        rows = [
            {"id": task.data.id or task.key[:_DIGITS], "messages": messages(task.data, text_of)}
            for task in tasks
        ]
    except Exception as error:  # of the environment's own code, for its author to read
        return {"error": str(error) if isinstance(error, NoEnvironment) else repr(error)}
    return {"rows": rows}


def main() -> None:
    """Lists the tasks of an environment."""
    channel = os.dup(1)
    os.dup2(2, 1)  # what an environment prints is not part of the answer
    gc.disable()  # nothing of an import is garbage, and looking for it takes a fifth of its time
    package = Package()
    gc.enable()
    said = listed(package, json.load(sys.stdin))
    with os.fdopen(channel, "w") as out:
        json.dump(said, out)


if __name__ == "__main__":
    main()
