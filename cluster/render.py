"""Input of a cluster's engine: scripts for SLURM and manifests for Kubernetes, from templates.

The templates are the files in cluster/slurm/ and cluster/kubernetes/, filled in by Jinja, and the
networks are those of cluster/networks.toml. Nothing here knows flags or asks a cluster.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from rl_code.config.read_config import ConfigError

FOLDER = Path(__file__).resolve().parent
# At which the processes of a role find their first one, in a pod of its own.
_PORT = 8476
# Longest name of a JobSet: a pod's has at most 63 characters, and its role and numbers follow.
_LONGEST = 40
# Words of templates for the roles, also the names of the replicated jobs.
ROLES = {
    "all": "A whole run in one process.",
    "learner": "The learner of a run: one process on each of its hosts.",
    "actors": "Actors of a run.",
    "prefill": "What prefills the prompts of a run's actors.",
    "learner_and_actors": "A run: its learner and its actors.",
    "sft": "The warm start of a run.",
    "sweep": "The runs of a sweep, and the table of what has finished.",
    "ray": "A run on the nodes of a Ray cluster.",
}
# The role of launch.train of all processes, where a job has processes of one role.
ALONE = {"all": "all", "actors": "actor", "prefill": "prefill", "sft": "all", "sweep": "all"}
ENGINES = ("slurm", "kubernetes")
# Characters of an option of sbatch.
_OPTION = re.compile(r"--?[\w-]+(=[\w./:@%+,=\[\]-]*)?")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_DNS = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of the environment, and why it is set."""

    name: str
    value: str
    why: str
    source: str


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of cluster/networks.toml, with the values that a cluster gives."""

    name: str
    title: str
    needs: str
    variables: tuple[Variable, ...]
    given: Mapping[str, str]
    # What must exist on every host; "" for nothing.
    path: str = ""
    # Further options of sbatch.
    sbatch: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """The program to run and its devices; the fields are the flags of launch.cluster."""

    engine: str
    role: str
    name: str
    # Arguments of the entry points: the config, its overrides and the workdir.
    arguments: Sequence[str]
    # Logs and rendered files are in its folder ``cluster``.
    workdir: str
    # Folder of the repository, on every host.
    repository: str
    python: str = "python"
    hosts: int = 1
    actors: int = 1
    first_actor: int = 0
    actor_hosts: int = 1
    # Whether a process of the role prefill belongs to the run.
    prefill: bool = False
    # Accelerators of a host; 0 for none.
    devices: int = 0
    # Role of launch.train -> how many of them a host of it uses; all, where a role is left out.
    used: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cpus: int = 0
    memory_gb: int = 0
    network: str = "none"
    network_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    time: str = "24:00:00"
    grace_s: int = 120
    retries: int = 3
    # Runs of a sweep, and how many at the same time; 0 for all.
    members: int = 0
    at_once: int = 0
    sbatch: Sequence[str] = ()
    address_interface: str = ""
    image: str = ""
    namespace: str = "default"
    claim: str = ""
    mount: str = "/shared"

    def devices_of(self, role: str) -> int:
        """Accelerators of a host that a role of launch.train is to have."""
        return min(self.devices, self.used.get(role, self.devices))


def render(job: Job) -> dict[str, str]:
    """File name -> text of everything that is submitted, ``submit.sh`` among them.

    Raises ConfigError for a value that is missing or cannot be.
    """
    check(job)
    return (_slurm if job.engine == "slurm" else _kubernetes)(job)


def check(job: Job) -> None:
    """Raises ConfigError where an engine cannot run a job."""
    for name, least in (("hosts", 1), ("actors", 1), ("actor_hosts", 1), ("grace_s", 1)):
        if getattr(job, name) < least:
            raise ConfigError(f"--{name}={getattr(job, name)} must be at least {least}")
    if job.role not in ROLES:
        raise ConfigError(f"--role={job.role} is not one of {', '.join(ROLES)}")
    if job.hosts > 1 and job.role in ("all", "sft", "sweep", "prefill"):
        raise ConfigError(
            f"--hosts={job.hosts}: --role={job.role} runs each of its processes on one host; only "
            "a learner and actors span several"
        )
    if not job.workdir.startswith("/"):
        raise ConfigError(f"--workdir={job.workdir} must be an absolute path on shared storage")
    if not re.fullmatch(r"[\w./@+=,-]+", job.workdir):
        raise ConfigError(f"--workdir={job.workdir} has characters that scripts cannot have in it")
    if job.network == "tpu_multislice":
        if job.engine == "slurm":
            raise ConfigError("--network=tpu_multislice: TPU slices need --engine=kubernetes")
        if job.role == "learner_and_actors" or (job.role == "actors" and job.actors > 1):
            raise ConfigError(
                "--network=tpu_multislice: all slices of a JobSet are one program; render the "
                "learner and each actor apart, by --role=learner and --role=actors --actors=1"
            )
    (_check_slurm if job.engine == "slurm" else _check_kubernetes)(job)


def _check_slurm(job: Job) -> None:
    if job.role == "ray":
        raise ConfigError("--role=ray: Ray's nodes are rendered for --engine=kubernetes")
    if not _TIME.fullmatch(job.time):
        raise ConfigError(f"--time={job.time} is no time of SLURM, as in 24:00:00 or 2-12:00:00")
    if not re.fullmatch(r"[\w.-]+", job.name):
        raise ConfigError(f"--name={job.name} may have letters, digits and . _ - in it")
    for option in job.sbatch:
        if not _OPTION.fullmatch(option):
            raise ConfigError(f"--sbatch={option} is no option of sbatch, as in --partition=gpu")


def _check_kubernetes(job: Job) -> None:
    if not _DNS.fullmatch(job.name) or len(job.name) > _LONGEST:
        raise ConfigError(
            f"--name={job.name} must be small letters, digits and dashes, begin with a letter, and "
            f"have at most {_LONGEST} of them"
        )
    for name, example in (("image", "registry/rl-code:1"), ("claim", "the volume's claim")):
        if not getattr(job, name):
            raise ConfigError(f"--{name}=<{example}> is missing; --engine=kubernetes needs it")
    if not f"{job.workdir}/".startswith(f"{job.mount.rstrip('/')}/"):
        raise ConfigError(
            f"--workdir={job.workdir} is not below --mount={job.mount}, where pods have --claim="
            f"{job.claim}"
        )
    if job.first_actor:
        raise ConfigError(
            f"--first_actor={job.first_actor}: actors of a JobSet are named after it; give another "
            "--name"
        )
    if job.role == "ray" and not job.cpus:
        raise ConfigError(
            "--cpus=<processors of a host> is missing; Ray's autoscaler does not start for nodes "
            "whose number of processors it is not told"
        )


# --- Networks -------------------------------------------------------------------------------------


def networks() -> dict[str, dict[str, Any]]:
    """The table of cluster/networks.toml: name -> what a network needs."""
    return tomllib.loads((FOLDER / "networks.toml").read_text())


def network(job: Job, hosts: int) -> Network:
    """The network of a job with its values filled in, for a role of so many hosts.

    Raises ConfigError for a value that is missing or unknown.
    """
    table = networks()
    del table["gpu"]
    if job.network not in table:
        raise ConfigError(f"--network={job.network} is not one of {', '.join(table)}")
    entry = table[job.network]
    wanted = dict(entry.get("values", {}))
    if job.engine == "kubernetes":
        wanted |= entry.get("kubernetes", {})
    for name, what in wanted.items():
        if not job.network_values.get(name):
            raise ConfigError(
                f"--network={job.network} needs --network_value={name}=<value>: {what}"
            )
    for name in job.network_values:
        if name not in wanted:
            known = ", ".join(wanted) or "no values"
            raise ConfigError(f"--network_value={name}: {job.network} on {job.engine} has {known}")
    values = {**job.network_values, "hosts": hosts}
    variables = (
        Variable(**row | {"value": row["value"].format_map(values)}) for row in entry["variables"]
    )
    return Network(
        job.network,
        entry["title"],
        entry["needs"],
        tuple(variables),
        job.network_values,
        entry.get("path", ""),
        tuple(option.format_map(values) for option in entry.get("sbatch", ())),
    )


def environment(job: Job, used: Network) -> list[Variable]:
    """The variables that a job sets; those that its platform sets are left out."""
    rows = networks()["gpu"]["variables"] if job.devices and not _on_tpu(job) else []
    found = [*(Variable(**row) for row in rows), *used.variables]
    return [variable for variable in found if not variable.value.startswith("set by ")]


def _on_tpu(job: Job) -> bool:
    return job.network == "tpu_multislice"


# --- Engines --------------------------------------------------------------------------------------


def train(job: Job, role: str) -> list[str]:
    """The command of one process of a role."""
    module = "launch.sft" if role == "sft" else "launch.train"
    flags = [] if role == "sft" else [f"--role={role}"]
    return [job.python, "-m", module, *job.arguments, *flags]


def _sweep(job: Job) -> list[str]:
    return [job.python, "-m", "launch.sweep", *job.arguments]


def _on_ray(job: Job) -> list[str]:
    """The command that runs the roles on Ray's nodes; a kind of node has its role as a resource."""

    def needs(role: str) -> str:
        devices = job.devices_of(role)
        return f"--{role}_needs={role}=1" + (f",GPU={devices}" if devices else "")

    return [
        *(job.python, "-m", "launch.on_ray", "--address=auto", *job.arguments),
        *(f"--hosts={job.hosts}", f"--actors={job.actors}", f"--actor_hosts={job.actor_hosts}"),
        *(needs("learner"), needs("actor"), *([needs("prefill")] if job.prefill else [])),
        f"--grace_s={job.grace_s}",
    ]


def _slurm(job: Job) -> dict[str, str]:
    """Batch scripts and the script that submits them."""
    hosts = job.actor_hosts if job.role == "actors" else job.hosts
    used = network(job, hosts)
    values = {
        **_common(job, used),
        "nodes": hosts,
        "array": job.role in ("actors", "sweep"),
        "logs": f"{job.workdir}/cluster/logs",
        "first": job.first_actor,
        "last": job.first_actor + job.actors - 1,
        "host": job.role in ("learner", "prefill"),
        "devices": job.devices_of(ALONE.get(job.role, "learner")),
        "actor_devices": job.devices_of("actor"),
        "prefill_devices": job.devices_of("prefill"),
        "actor_network": network(job, job.actor_hosts),
        "prefill_network": network(job, 1),
        "prefill_command": train(job, "prefill"),
        "learner_command": train(job, "learner") + ["--distributed"] * (job.hosts > 1),
        "actor_command": train(job, "actor") + ["--distributed"] * (job.actor_hosts > 1),
    }
    if job.role == "sweep":
        files = {"sweep.sh": "sweep.sh", "sweep_table.sh": "sweep_table.sh"}
        values["command"] = _sweep(job)
    elif job.role in ("actors", "learner_and_actors"):
        files = {f"{job.role}.sh": f"{job.role}.sh"}
        values["command"] = values["actor_command"]
    else:
        files = {f"{job.role}.sh": "run.sh"}
        values["command"] = (
            values["learner_command"] if job.role == "learner" else train(job, job.role)
        )
    values["script"] = next(iter(files))
    files["submit.sh"] = "submit.sh"
    return {name: fill(f"slurm/{template}", values) for name, template in files.items()}


def _kubernetes(job: Job) -> dict[str, str]:
    """A manifest, and the script that applies it."""
    used = network(job, job.actor_hosts if job.role == "actors" else job.hosts)
    values = {
        **_common(job, used),
        "image": job.image,
        "namespace": job.namespace,
        "claim": job.claim,
        "mount": job.mount,
        "domain": f"{job.name}-imex" if job.network == "nvlink" else "",
        "pins_memory": "resource" in job.network_values or job.network == "nvlink",
        "jobs": _pods(job),
        "head": Pods("head", [], sandboxes=False),
    }
    if job.role != "ray":
        values["manifest"] = "jobset.yaml"
        return {
            "jobset.yaml": fill("kubernetes/jobset.yaml", values),
            "submit.sh": fill("kubernetes/submit.sh", values),
        }
    values["command"] = [
        "bash",
        f"{job.repository}/cluster/kubernetes/ray_run.sh",
        *_on_ray(job),
    ]
    for word in values["command"]:
        if shlex.quote(word) != word:
            raise ConfigError(
                f"{word}: a job of Ray passes its words through a shell; write this into the config"
            )
    values["manifest"] = "ray_cluster.yaml"
    return {
        "ray_cluster.yaml": fill("kubernetes/ray_cluster.yaml", values),
        "ray_job.sh": fill("kubernetes/ray_job.sh", values),
        "submit.sh": fill("kubernetes/submit.sh", values),
    }


@dataclasses.dataclass(frozen=True)
class Pods:
    """Pods of a kind: ``replicas`` programs, each on ``completions`` hosts."""

    name: str
    command: Sequence[str]
    replicas: int = 1
    completions: int = 1
    parallelism: int = 1
    # Failed pods after which the program has failed.
    backoff: int = 0
    # Whether pods know their number among those of their program, and the program's.
    indexed: bool = False
    # What each may use: resource -> amount.
    resources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Whether code that a model wrote runs in them, in sandboxes.
    sandboxes: bool = True


def _pods(job: Job) -> list[Pods]:
    """The kinds of pods of a role with what they may use, the one first whose end is the end of
    all.
    """
    return [
        dataclasses.replace(
            pods,
            resources=_resources(job, ALONE.get(job.role, pods.name)),
            sandboxes=pods.name != "prefill",
        )
        for pods in _kinds(job)
    ]


def _kinds(job: Job) -> list[Pods]:
    """As ``_pods``, without what they may use."""
    if job.role == "ray":
        actors = job.actors * job.actor_hosts
        found = [Pods("learner", [], replicas=job.hosts), Pods("actor", [], replicas=actors)]
        return found + [Pods("prefill", [])] * job.prefill
    if job.role == "sweep":
        member = [
            "bash",
            "cluster/kubernetes/sweep_member.sh",
            "$(PROCESS)",
            *_sweep(job),
        ]
        at_once = min(job.at_once or job.members, job.members)
        return [Pods("run", member, 1, job.members, at_once, indexed=True)]
    found = []
    if job.role in ("learner", "learner_and_actors"):
        replicas = int(job.network_values.get("slices", 1))
        command = [*train(job, "learner"), "--host=$(POD_IP)", *_together(job, "learner")]
        found.append(
            Pods("learner", command, replicas, job.hosts, job.hosts, indexed=True),
        )
    if job.role in ("actors", "learner_and_actors"):
        name = [f"--name={job.name}-$(REPLICA)", "--host=$(POD_IP)"]
        command = [*train(job, "actor"), *name, *_together(job, "actor")]
        hosts = job.actor_hosts
        backoff = job.retries * hosts  # an actor's failure is its own
        found.append(Pods("actor", command, job.actors, hosts, hosts, backoff, indexed=True))
    if job.role == "prefill" or (job.role == "learner_and_actors" and job.prefill):
        command = [*train(job, "prefill"), "--host=$(POD_IP)"]
        found.append(Pods("prefill", command, backoff=job.retries))
    if job.role in ("all", "sft"):
        found.append(Pods(job.role, train(job, job.role)))
    return found


def _together(job: Job, role: str) -> list[str]:
    """Flags by which the hosts of one program find each other."""
    hosts = job.actor_hosts if role == "actor" else job.hosts
    if _on_tpu(job):
        return ["--distributed"]
    if hosts == 1:
        return []
    first = f"{job.name}-{role}-$(REPLICA)-0.{job.name}:{_PORT}"
    return [f"--coordinator={first}", f"--processes={hosts}", "--process=$(PROCESS)"]


def _resources(job: Job, role: str) -> dict[str, str]:
    """Resources that a pod of a role of launch.train may use: resource -> amount."""
    kind = "google.com/tpu" if _on_tpu(job) else "nvidia.com/gpu"
    # a host of a TPU slice is given out as a whole
    found = {kind: job.devices if _on_tpu(job) else job.devices_of(role)}
    found |= {"cpu": job.cpus, job.network_values.get("resource", ""): 1}
    amounts = {name: str(amount) for name, amount in found.items() if name and amount}
    return amounts | ({"memory": f"{job.memory_gb}Gi"} if job.memory_gb else {})


def _common(job: Job, used: Network) -> dict[str, Any]:
    """Values of the templates of both engines."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
    return {
        **fields,
        "what": ROLES[job.role],
        "network": used,
        "environment": environment(job, used),
    }


# --- Templates ------------------------------------------------------------------------------------


def fill(template: str, values: Mapping[str, Any]) -> str:
    """A template of this folder, filled in. Raises ConfigError if it needs a value that is not
    there.
    """
    # what a template includes is in its own folder
    folder, _, name = template.partition("/")
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters |= {
        "sh": lambda value: shlex.quote(str(value)),
        "words": shlex.join,
        "tojson": lambda value: json.dumps(value, ensure_ascii=False),
    }
    try:
        return jinja.get_template(name).render(values)
    except jinja2.UndefinedError as error:
        raise ConfigError(f"cluster/{template}: {error}; name the value") from error
