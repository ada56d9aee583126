"""Renders scripts for SLURM or manifests for Kubernetes from a config, and submits them.

    python -m launch.cluster --engine=slurm --role=learner --hosts=2 --devices=8 \\
        --config=configs/X.py --workdir=/shared/runs/x --sbatch=--partition=gpu [--dry_run]

The config, its overrides and the workdir are those of the local commands. The templates are in
cluster/slurm/ and cluster/kubernetes/, the networks in cluster/networks.toml. Everything is written
into a folder below cluster/ in the workdir, or into --out, and submit.sh there is run; with
--dry_run it is printed instead. docs/operations.md tells what happens when a job is pre-empted or
fails. Flags that belong to a cluster can stand in a file: --flagfile=my_cluster.flags.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from cluster.render import ALONE, ENGINES, ROLES, Job, networks, render
from launch import flags
from rl_code.config import read_config
from rl_code.run.config import RunConfig, check_prefill, meshes, refuse_sync
from sweeps import runs as sweep_runs

ROOT = Path(__file__).resolve().parents[1]
FLAGS = absl_flags.FLAGS


class SubmitError(RuntimeError):
    """The engine did not take the job; it has said why."""


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    job = job_of(config, str(workdir))
    files = render(job)
    if job.engine == "kubernetes" and not FLAGS.dry_run and not FLAGS.out:
        raise read_config.ConfigError(
            "--out=<folder> is missing: the workdir is the pods', so name a folder of this machine"
        )
    if FLAGS.dry_run:
        for name, text in files.items():
            print(f"----- {name}\n{text}")
    folder = Path(FLAGS.out or f"{workdir}/cluster/{job.name}")
    if not FLAGS.dry_run or FLAGS.out:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        print(f"written: {', '.join(str(folder / name) for name in files)}", flush=True)
    if not FLAGS.dry_run and (code := subprocess.run(["bash", folder / "submit.sh"]).returncode):
        raise SubmitError(f"{folder / 'submit.sh'} ended with exit code {code}")


def job_of(config: ml_collections.ConfigDict, workdir: str) -> Job:
    """The request of the flags. Raises ConfigError where the config cannot run so."""
    run_config = read_config.build(RunConfig, config)
    on_pods = FLAGS.engine == "kubernetes"
    repository = FLAGS.repository or ("/opt/rl-code" if on_pods else str(ROOT))
    path = config_flags.get_config_filename(FLAGS["config"])
    count = 0
    if FLAGS.role == "sweep":
        count = members(config, path, workdir)
    elif FLAGS.role == "sft" and run_config.sft is None:
        raise read_config.ConfigError("config.sft = None: this config has no warm start")
    elif FLAGS.role in ("learner", "actors", "learner_and_actors", "ray"):
        refuse_sync(run_config)
    elif FLAGS.role == "prefill":
        check_prefill(run_config)
    prefill = run_config.rollout.prefill is not None
    if prefill and FLAGS.actor_hosts > 1:
        raise read_config.ConfigError(
            f"--actor_hosts={FLAGS.actor_hosts}: with config.rollout.prefill pages go from one "
            "process to one process, so an actor has one host; set rollout.prefill to None, or "
            "start more actors"
        )
    given = dict(_pair(value) for value in FLAGS.network_value)
    slices = given.get("slices", "1")
    if not slices.isdigit() or slices == "0":
        raise read_config.ConfigError(f"--network_value=slices={slices}: expected a number above 0")
    used = {
        role: check_devices(run_config, role, hosts, FLAGS.devices)
        for role, hosts in _hosts(int(slices), prefill).items()
    }
    return Job(
        name=FLAGS.name or _name(f"{Path(workdir).name} {FLAGS.role}"),
        arguments=[
            f"--config={_on_hosts(path, repository, on_pods)}",
            *flags.overrides(),
            f"--workdir={workdir}",
        ],
        workdir=workdir,
        repository=repository,
        python=FLAGS.python or ("python" if on_pods else sys.executable),
        members=count,
        prefill=prefill,
        used=used,
        network_values=given,
        **{
            name: getattr(FLAGS, name)
            for name in (
                *("engine", "role", "hosts", "actors", "first_actor", "actor_hosts", "devices"),
                *("cpus", "memory_gb", "network", "time", "grace_s", "retries", "at_once"),
                *("sbatch", "address_interface", "image", "namespace", "claim", "mount"),
            )
        },
    )


def members(config: ml_collections.ConfigDict, path: str, workdir: str) -> int:
    """Number of runs of the sweep of a config file. Raises ConfigError if it has none."""
    overrides, _ = flags.sweep_of(path)
    return len(sweep_runs.plan(config, overrides, Path(workdir)))


def _hosts(slices: int, prefill: bool) -> dict[str, int]:
    """Role of launch.train -> hosts of one of its programs, for the roles that are rendered."""
    role = ALONE.get(FLAGS.role, FLAGS.role)
    if role in ("learner_and_actors", "ray"):
        found = {"learner": FLAGS.hosts, "actor": FLAGS.actor_hosts}
        return found | ({"prefill": 1} if prefill else {})
    return {role: FLAGS.actor_hosts if role == "actor" else FLAGS.hosts * slices}


def check_devices(config: RunConfig, role: str, hosts: int, devices: int) -> int:
    """Accelerators of each host that a role's meshes use: all of them where a mesh takes what is
    left (data=0). Raises ConfigError if the meshes need more than the hosts have.

    devices: accelerators of a host; 0 for its processors, of which any number can be asked for.
    """
    taken = meshes(config, role)
    needed = flags.devices_of(taken)
    if devices and needed > hosts * devices:
        raise read_config.ConfigError(
            f"{hosts} hosts with --devices={devices} have {hosts * devices}, and the "
            f"meshes of the role {role} need {needed}"
        )
    return devices if any(mesh.data == 0 for mesh in taken) else min(devices, -(-needed // hosts))


def _on_hosts(path: str, repository: str, on_pods: bool) -> str:
    """The config file as the hosts know it; a pod has those of the repository alone."""
    file, colon, argument = path.partition(":")
    absolute = Path(file).resolve()
    if absolute.is_relative_to(ROOT):
        return f"{absolute.relative_to(ROOT)}{colon}{argument}"
    if on_pods:
        raise read_config.ConfigError(
            f"--config={file} is outside of the repository, so pods do not have it; put it into "
            f"the image, in {repository}"
        )
    return f"{absolute}{colon}{argument}"


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise read_config.ConfigError(f"--network_value={text}: expected <name>=<value>")
    return name, value


def _name(words: str) -> str:
    """A name for a job, which engines accept."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def define_flags() -> None:
    """Flags of this command alone: other modules have some of the same name."""
    absl_flags.DEFINE_enum("engine", "slurm", ENGINES, "Which engine runs it.")
    absl_flags.DEFINE_enum("role", "all", list(ROLES), "What runs.")
    absl_flags.DEFINE_string("name", None, "Of the job; the workdir's and the role's unless given.")
    absl_flags.DEFINE_integer("hosts", 1, "Hosts of the learner; of one slice on TPUs.", 1)
    absl_flags.DEFINE_integer("actors", 1, "How many actors.", 1)
    absl_flags.DEFINE_integer(
        "first_actor",
        0,
        "Number of the first actor; those that join a run have numbers of their own.",
        0,
    )
    absl_flags.DEFINE_integer("actor_hosts", 1, "Hosts of each actor.", 1)
    absl_flags.DEFINE_integer(
        "devices",
        0,
        "Accelerators of a host; each role asks for as many as its meshes use. 0 for processors.",
        0,
    )
    absl_flags.DEFINE_integer("cpus", 0, "Processors of a host; 0 for what the cluster gives.", 0)
    absl_flags.DEFINE_integer("memory_gb", 0, "Memory of a host; 0 for what the cluster gives.", 0)
    absl_flags.DEFINE_enum(
        "network",
        "none",
        [name for name in networks() if name != "gpu"],
        "What connects the hosts; docs/operations.md has the table.",
    )
    absl_flags.DEFINE_multi_string(
        "network_value",
        [],
        "<name>=<value> that the network needs of this cluster; may be repeated.",
    )
    absl_flags.DEFINE_string("time", "24:00:00", "Time limit of a SLURM job.")
    absl_flags.DEFINE_integer(
        "grace_s", 120, "Seconds from the request to stop to the end: a step and a checkpoint.", 1
    )
    absl_flags.DEFINE_integer("retries", 3, "How often a job that failed comes back.", 0)
    absl_flags.DEFINE_integer("at_once", 0, "Runs of a sweep at the same time; 0 for all.", 0)
    absl_flags.DEFINE_multi_string(
        "sbatch", [], "A further option of sbatch, as in --sbatch=--partition=gpu; may be repeated."
    )
    absl_flags.DEFINE_string(
        "address_interface",
        "",
        "Network interface at whose address other roles reach a host; the first unless given.",
    )
    absl_flags.DEFINE_string(
        "python", None, "Python of the hosts; this one, or a pod's, unless given."
    )
    absl_flags.DEFINE_string(
        "repository",
        None,
        "Folder of this repository on the hosts; its own, or /opt/rl-code in a pod.",
    )
    absl_flags.DEFINE_string("image", "", "Container image of pods, which has the repository.")
    absl_flags.DEFINE_string("namespace", "default", "Of Kubernetes.")
    absl_flags.DEFINE_string("claim", "", "Claim of the volume that pods share.")
    absl_flags.DEFINE_string("mount", "/shared", "Where pods have that volume.")
    absl_flags.DEFINE_string(
        "out", None, "Folder for what is rendered; <workdir>/cluster unless given."
    )
    absl_flags.DEFINE_bool(
        "dry_run", False, "Print everything, and write it only if --out is given; submit nothing."
    )


if __name__ == "__main__":
    define_flags()
    flags.run(main, kind=RunConfig, expected=(SubmitError,))
