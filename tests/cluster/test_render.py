"""What launch.cluster renders: scripts that bash accepts, manifests that their schemas accept, and
clear words for values that are missing or wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import render as cluster_render
from cluster.render import ROLES, Job, networks, render
from configs import faults
from launch import cluster as launch_cluster
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.run.config import RunConfig
from tests import programs
from tests.late import Late

kubeflow = Late("kubeflow_trainer_api.models")


ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = (
    "--config=configs/faults.py:smoke",
    "--config.model.attention=({'name': 'nsa'}, 'dense')",
    "--workdir=/shared/runs/x",
)
SLURM = Job("slurm", "learner", "x", ARGUMENTS, "/shared/runs/x", "/shared/rl-code", "/venv/python")
KUBERNETES = dataclasses.replace(
    SLURM, engine="kubernetes", image="registry/rl-code:1", claim="data", python="python"
)
# Values that each network needs.
VALUES = {
    "none": {},
    "nvlink": {"interface": "eth0"},
    "infiniband": {"interface": "eth0", "adapters": "=mlx5_0,mlx5_1"},
    "roce": {"interface": "eth0", "adapters": "=mlx5_0", "traffic_class": "106"},
    "tpu_multislice": {"slices": "2", "accelerator": "tpu-v5p-slice", "topology": "4x4x4"},
}
ON_PODS = {"infiniband": {"resource": "rdma/ib"}, "roce": {"resource": "rdma/roce"}}
SEVERAL = ("learner", "actors", "learner_and_actors")


def jobs(engine: str) -> list[Job]:
    """Every role with every network that an engine has, on several hosts where it can."""
    base = SLURM if engine == "slurm" else KUBERNETES
    found = []
    for role, network in itertools.product(ROLES, VALUES):
        slices = network == "tpu_multislice"
        if engine == "slurm" and (role == "ray" or slices):
            continue
        if slices and role not in ("learner", "all"):
            continue
        values = VALUES[network] | (ON_PODS.get(network, {}) if engine == "kubernetes" else {})
        several = 2 if role in (*SEVERAL, "ray") else 1
        prefill = role in ("prefill", "ray", "learner_and_actors")
        found.append(
            dataclasses.replace(
                base,
                role=role,
                arguments=ARGUMENTS if role != "ray" else (ARGUMENTS[0], ARGUMENTS[2]),
                network=network,
                network_values=values,
                hosts=several,
                actors=3,
                actor_hosts=several,
                prefill=prefill and network != "none",
                devices=4,
                cpus=16,
                memory_gb=200,
                members=5 if role == "sweep" else 0,
                at_once=2,
            )
        )
    return found


def label(job: Job) -> str:
    return f"{job.role}-{job.network}"


def manifests(text: str) -> dict[str, dict[str, Any]]:
    """Kind -> manifest."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


# --- SLURM ----------------------------------------------------------------------------------------


def options(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def commands(script: str) -> list[list[str]]:
    """Words of the lines that start processes of the project."""
    joined = script.replace("\\\n", "")
    return [shlex.split(line) for line in joined.splitlines() if "-m launch." in line]


@pytest.mark.parametrize("job", jobs("slurm"), ids=label)
def test_a_script_of_slurm_is_whole(job, tmp_path):
    files = render(job)
    assert "submit.sh" in files
    for name, text in files.items():
        assert "{{" not in text and "{%" not in text
        (tmp_path / name).write_text(text)
        parsed = subprocess.run(["bash", "-n", tmp_path / name], capture_output=True, text=True)
        assert parsed.returncode == 0, f"{name}: {parsed.stderr}"
        last = [i for i, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")][-1:]
        first = [i for i, line in enumerate(text.splitlines()) if line[:1] not in ("#", "")]
        assert not last or last[0] < first[0], "sbatch reads no option behind the first command"
        for words in commands(text):  # arguments arrive as they were given
            assert set(ARGUMENTS) <= set(words)
    script = files[next(iter(files))]
    for variable in cluster_render.environment(job, cluster_render.network(job, 2)):
        assert f"export {variable.name}={shlex.quote(variable.value)}" in script
    assert "--requeue" in options(script) and "--signal=TERM@120" in options(script)
    assert "export JAX_LOCAL_DEVICE_IDS=0,1,2,3" in script


def test_the_hosts_of_one_role_are_told_that_they_are_several():
    for role, hosts in itertools.product(SEVERAL, (1, 2)):
        job = dataclasses.replace(SLURM, role=role, hosts=hosts, actor_hosts=hosts, actors=2)
        script = render(job)[f"{role}.sh"]
        assert all(("--distributed" in words) == (hosts == 2) for words in commands(script))
        assert options(script).count(f"--nodes={hosts}") == {"learner_and_actors": 3}.get(role, 1)
    learner, actor = commands(script)
    assert "--role=learner" in learner and "--role=actor" in actor
    assert options(script).count("hetjob") == 2


def test_what_prefills_prompts_is_a_part_of_the_run():
    changes = dict(role="learner_and_actors", actors=2)
    job = dataclasses.replace(SLURM, **changes)
    without = render(job)["learner_and_actors.sh"]
    script = render(dataclasses.replace(job, prefill=True))["learner_and_actors.sh"]
    assert "prefill" not in without and options(without).count("hetjob") == 2
    assert options(script).count("hetjob") == 3
    (words,) = (words for words in commands(script) if "--role=prefill" in words)
    assert "--het-group=3" in words and "launch/supervise.sh" in words
    (own,) = commands(render(dataclasses.replace(SLURM, role="prefill"))["prefill.sh"])
    assert "--role=prefill" in own and any("--host=" in word for word in own)
    manifest = render(dataclasses.replace(KUBERNETES, **changes, prefill=True))["jobset.yaml"]
    jobs = manifests(manifest)["JobSet"]["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["learner", "actor", "prefill"]
    (container,) = jobs[-1]["template"]["spec"]["template"]["spec"]["containers"]
    assert {"--role=prefill", "--host=$(POD_IP)"} <= {*container["command"]}


def test_actors_join_with_numbers_of_their_own():
    script = render(dataclasses.replace(SLURM, role="actors", actors=3, first_actor=4))["actors.sh"]
    assert "--array=4-6" in options(script)
    assert '--name="actor-$SLURM_ARRAY_TASK_ID"' in script


def test_a_sweep_is_an_array_and_a_table_that_waits_for_all_of_it():
    files = render(dataclasses.replace(SLURM, role="sweep", members=12, at_once=3))
    assert "--array=0-11%3" in options(files["sweep.sh"])
    (words,) = commands(files["sweep.sh"])
    assert "--run=$SLURM_ARRAY_TASK_ID" in words
    (words,) = commands(files["sweep_table.sh"])
    assert "--jobs=0" in words and "--requeue" not in options(files["sweep_table.sh"])
    assert '--dependency="afterany:${array' in files["submit.sh"]


# Stands in for srun: ends with the code in the file code, after a line in the file wait if any.
SRUN = """#!/usr/bin/env bash
echo started >>started
while [ -e wait ]; do sleep 0.02; done
exit "$(cat code)"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>requeued
"""


@pytest.fixture
def batch(tmp_path):
    """Runs the script of a whole run as slurmd would, with clients that only note what they are
    asked.
    """
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    workdir = str(tmp_path / "run")
    (tmp_path / "run" / "cluster" / "logs").mkdir(parents=True)
    job = dataclasses.replace(
        SLURM, role="all", workdir=workdir, repository=str(tmp_path), retries=2
    )
    (tmp_path / "all.sh").write_text(render(job)["all.sh"])

    def start(code: int) -> subprocess.Popen[bytes]:
        (tmp_path / "code").write_text(str(code))
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
        }
        return subprocess.Popen(["bash", tmp_path / "all.sh"], env=environment, cwd=tmp_path)

    start.folder = tmp_path
    return start


def requeued(batch) -> int:
    path = batch.folder / "requeued"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("code", "comes_back"), [(0, 0), (2, 0), (130, 4), (143, 4), (1, 2), (137, 2)]
)
def test_a_job_comes_back_unless_it_is_complete_or_would_fail_again(batch, code, comes_back):
    for _ in range(4):  # of which two retries are allowed after failures
        assert batch(code).wait(30) == code
    assert requeued(batch) == comes_back


def test_a_job_that_slurm_ends_does_not_put_itself_back(batch):
    (batch.folder / "wait").touch()
    process = batch(130)
    while not (batch.folder / "started").exists():
        assert process.poll() is None
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # its command has time to end
    (batch.folder / "wait").unlink()
    assert process.wait(300) == 130
    assert requeued(batch) == 0


# --- Kubernetes -----------------------------------------------------------------------------------


def unknown(given: Any, known: Any, path: str = "") -> list[str]:
    """Where ``given`` has a field or a value that ``known``, what a schema made of it, has not."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [
            problem
            for key, value in given.items()
            for problem in unknown(value, known.get(key), f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [
            problem
            for i, (one, other) in enumerate(zip(given, known, strict=True))
            for problem in unknown(one, other, f"{path}[{i}]")
        ]
    return [] if given == known else [f"{path}: {given!r} became {known!r}"]


def check_jobset(manifest: dict[str, Any]) -> list[str]:
    """Problems of a JobSet; raises pydantic's error where a field is missing or of another type."""
    model = kubeflow.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    return unknown(manifest, model) + unknown(model, manifest)  # what is missing is "" in the model


# The fields of a RayCluster, as in ray-operator/apis/ray/v1/raycluster_types.go of KubeRay; templates
# of pods are Kubernetes' own.
RAY_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *("headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling"),
        *("autoscalerOptions", "headServiceAnnotations", "suspend"),
    },
    "head": {"serviceType", "headService", "enableIngress", "rayStartParams", "template"},
    "worker": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams"),
        *("template", "scaleStrategy"),
    },
}
RAY_NEEDED = {
    "head": {"rayStartParams", "template"},
    "worker": {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def check_ray_cluster(manifest: dict[str, Any]) -> list[str]:
    """Problems of a RayCluster."""
    spec = manifest["spec"]
    groups = [("head", spec["headGroupSpec"])]
    groups += [("worker", group) for group in spec["workerGroupSpecs"]]
    problems = [f"{field}?" for field in manifest.keys() - RAY_FIELDS[""]]
    problems += [f"spec.{field}?" for field in spec.keys() - RAY_FIELDS["spec"]]
    for kind, group in groups:
        problems += [f"{kind}.{field}?" for field in group.keys() - RAY_FIELDS[kind]]
        problems += [f"{kind}.{field} is missing" for field in RAY_NEEDED[kind] - group.keys()]
        parameters = group["rayStartParams"]
        problems += [f"{name}: no text" for name in parameters if type(parameters[name]) is not str]
        pod = kubeflow.IoK8sApiCoreV1PodTemplateSpec.from_dict(group["template"])
        problems += unknown(group["template"], pod.to_dict())
        problems += unknown(pod.to_dict(), group["template"])
    return problems


def ray_nodes(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind of node -> how many there may be and what they offer, as Ray's autoscaler reads it.

    The autoscaler's own function reads the manifest, and checks the result against Ray's schema. It
    raises where a count is missing or text is not in the form that Ray wants.
    """
    name = "ray.autoscaler._private.kuberay.autoscaling_config"
    reader = pytest.importorskip(name, reason="needs requirements/ray.txt")
    return reader._derive_autoscaling_config_from_ray_cr(manifest)["available_node_types"]


def needs(command: list[str], role: str) -> dict[str, int]:
    """The resources that launch.on_ray asks of the node of a process."""
    (text,) = (word for word in command if word.startswith(f"--{role}_needs="))
    pairs = (part.split("=") for part in text.partition("=")[2].split(","))
    return {resource: int(amount) for resource, amount in pairs}


@pytest.mark.parametrize("job", [job for job in jobs("kubernetes") if job.role == "ray"], ids=label)
def test_rays_autoscaler_reads_nodes_on_which_every_process_fits(job):
    files = render(job)
    nodes = ray_nodes(manifests(files["ray_cluster.yaml"])["RayCluster"])
    (command,) = commands(files["ray_job.sh"])
    # none of the roles runs on the head
    head = nodes.pop("headgroup")
    assert (head["max_workers"], head["resources"]["CPU"]) == (0, 0)
    counts = {name: (node["min_workers"], node["max_workers"]) for name, node in nodes.items()}
    wanted = {"learner": (job.hosts, job.hosts), "actor": (0, job.actors * job.actor_hosts)}
    assert counts == wanted | ({"prefill": (0, 1)} if job.prefill else {})
    for role, node in nodes.items():
        offered = {"CPU": job.cpus, "GPU": job.devices, "memory": job.memory_gb * 2**30, role: 1}
        assert node["resources"] == offered
        # on_ray asks for all devices of a host, so a node has room for one process
        assert needs(command, role) == {role: 1, "GPU": job.devices}


@pytest.mark.parametrize("job", jobs("kubernetes"), ids=label)
def test_a_manifest_has_only_what_its_schema_has(job, tmp_path):
    files = render(job)
    for name, text in files.items():
        if name.endswith(".sh"):
            (tmp_path / name).write_text(text)
            assert subprocess.run(["bash", "-n", tmp_path / name]).returncode == 0
    if job.role == "ray":
        found = manifests(files["ray_cluster.yaml"])["RayCluster"]
        assert check_ray_cluster(found) == []
        groups = found["spec"]["workerGroupSpecs"]
        templates = [group["template"] for group in groups]
        (command,) = commands(files["ray_job.sh"])
        assert {job.arguments[0], "--actors=3", "--learner_needs=learner=1,GPU=4"} <= set(command)
        replicas = [job.hosts, 3 * job.actor_hosts, *([1] if job.prefill else [])]
        assert [group["replicas"] for group in groups] == replicas
        assert ("--prefill_needs=prefill=1,GPU=4" in command) == job.prefill
    else:
        kinds = manifests(files["jobset.yaml"])
        found = kinds["JobSet"]
        assert ("ComputeDomain" in kinds) == (job.network == "nvlink")
        assert check_jobset(found) == []
        replicated = [one["template"]["spec"] for one in found["spec"]["replicatedJobs"]]
        templates = [one["template"] for one in replicated]
        for one in replicated:
            (container,) = one["template"]["spec"]["containers"]
            assert set(ARGUMENTS) <= set(container["command"])
            codes = {
                code: rule["action"]
                for rule in one["podFailurePolicy"]["rules"]
                for code in rule.get("onExitCodes", {}).get("values", ())
            }
            fails = "FailIndex" if job.role == "sweep" else "FailJob"
            assert codes == {2: fails, 130: "Ignore", 143: "Ignore"}
    used = cluster_render.environment(job, cluster_render.network(job, job.hosts))
    for template in templates:
        (container,) = template["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert {one.name: one.value for one in used}.items() <= variables.items()
        limits = container["resources"]["limits"]
        device = "google.com/tpu" if job.network == "tpu_multislice" else "nvidia.com/gpu"
        assert limits[device] == "4" and limits["memory"] == "200Gi"
        if job.network in ON_PODS:
            assert limits[ON_PODS[job.network]["resource"]] == "1"


def test_the_checks_of_manifests_find_what_is_wrong():
    job = dataclasses.replace(KUBERNETES, role="learner")
    text = render(job)["jobset.yaml"]
    wrong = manifests(text.replace("terminationGracePeriodSeconds", "terminationGracePeriod"))
    assert "terminationGracePeriod" in check_jobset(wrong["JobSet"])[0]
    assert check_jobset(manifests(text.replace("action: FailJobSet", "do: it"))["JobSet"])
    assert check_jobset(manifests(text.replace("      action: FailJobSet\n", ""))["JobSet"])
    with pytest.raises(ValueError, match="validation error"):
        check_jobset(manifests(text.replace("completions: 1", "completions: many"))["JobSet"])
    job = dataclasses.replace(job, role="ray", arguments=ARGUMENTS[:1], cpus=16)
    text = render(job)["ray_cluster.yaml"]
    for old, new, word in (
        ("minReplicas", "leastReplicas", "leastReplicas"),
        ("volumeMounts", "mounts", "mounts"),
        ('num-cpus: "0"', "num-cpus: 0", "num-cpus"),
    ):
        wrong = manifests(text.replace(old, new))["RayCluster"]
        assert any(word in problem for problem in check_ray_cluster(wrong))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('num-cpus: "0"', "num-cpus: none", ValueError),
        ("minReplicas", "leastReplicas", KeyError),
        # The text of resources is JSON within a second pair of quotes.
        (r'"\"{\\\"learner\\\": 1}\""', r'"{\"learner\": 1}"', ValueError),
        # Without a number of processors the autoscaler would not start.
        ('"cpu": "16"', '"other": "16"', ValueError),
    ],
)
def test_rays_autoscaler_refuses_what_it_cannot_read(old, new, error):
    job = dataclasses.replace(KUBERNETES, role="ray", arguments=ARGUMENTS[:1], cpus=16)
    text = render(job)["ray_cluster.yaml"]
    assert old in text
    with pytest.raises(error):
        ray_nodes(manifests(text.replace(old, new))["RayCluster"])


def test_pods_find_their_first_one_by_its_name():
    job = dataclasses.replace(
        KUBERNETES, role="learner_and_actors", hosts=4, actors=2, actor_hosts=2
    )
    spec = manifests(render(job)["jobset.yaml"])["JobSet"]["spec"]
    learner, actor = spec["replicatedJobs"]
    assert (learner["replicas"], learner["template"]["spec"]["completions"]) == (1, 4)
    assert (actor["replicas"], actor["template"]["spec"]["completions"]) == (2, 2)
    words = actor["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {
        "--coordinator=x-actor-$(REPLICA)-0.x:8476",
        "--processes=2",
        "--process=$(PROCESS)",
        "--name=x-$(REPLICA)",
        "--host=$(POD_IP)",
    } <= set(words)
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["learner"]
    slices = dataclasses.replace(
        KUBERNETES,
        network="tpu_multislice",
        network_values=VALUES["tpu_multislice"],
        hosts=16,
        devices=4,
    )
    (learner,) = manifests(render(slices)["jobset.yaml"])["JobSet"]["spec"]["replicatedJobs"]
    assert (learner["replicas"], learner["template"]["spec"]["completions"]) == (2, 16)
    command = learner["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--distributed" in command and not any("--coordinator" in word for word in command)


def test_a_member_of_a_sweep_passes_a_stop_on_and_leaves_a_table(tmp_path):
    program = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "(folder / sys.argv[-1].strip('-')).touch()\n"
        "while (folder / 'wait').exists() and sys.argv[-1] != '--jobs=0': time.sleep(0.01)\n"
        "sys.exit(1 if sys.argv[-1] == '--jobs=0' else 3)\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [
        *("bash", str(ROOT / "cluster/kubernetes/sweep_member.sh"), "4"),
        *(sys.executable, str(tmp_path / "program.py"), f"--workdir={tmp_path}"),
    ]
    assert subprocess.run(command).returncode == 3  # the run's own code, not the table's
    assert (tmp_path / "run=4").exists() and (tmp_path / "jobs=0").exists()
    (tmp_path / "run=4").unlink()
    (tmp_path / "jobs=0").unlink()
    (tmp_path / "wait").touch()
    process = subprocess.Popen(command)
    while not (tmp_path / "run=4").exists():
        assert process.poll() is None
    process.terminate()
    assert process.wait(300) == 130
    assert not (tmp_path / "jobs=0").exists()


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (SLURM, {"role": "all", "hosts": 2}, "--hosts=2: --role=all runs each of its processes on"),
        (SLURM, {"workdir": "runs/x"}, "--workdir=runs/x must be an absolute path"),
        (SLURM, {"workdir": "/a b"}, "--workdir=/a b has characters that scripts cannot have"),
        (SLURM, {"time": "a day"}, "--time=a day is no time of SLURM"),
        (SLURM, {"name": "a b"}, "--name=a b may have letters"),
        (SLURM, {"sbatch": ["partition gpu"]}, "--sbatch=partition gpu is no option of sbatch"),
        (SLURM, {"sbatch": ["--a=b\n#SBATCH --c"]}, "is no option of sbatch"),
        (SLURM, {"role": "ray"}, "--role=ray: Ray's nodes are rendered for --engine=kubernetes"),
        (SLURM, {"network": "tpu_multislice"}, "TPU slices need --engine=kubernetes"),
        (SLURM, {"network": "roce"}, "--network=roce needs --network_value=interface=<value>"),
        (
            SLURM,
            {"network": "nvlink", "network_values": {"interface": "eth0", "adapters": "x"}},
            "--network_value=adapters: nvlink on slurm has interface",
        ),
        (SLURM, {"network_values": {"a": "b"}}, "none on slurm has no values"),
        (SLURM, {"actors": 0}, "--actors=0 must be at least 1"),
        (KUBERNETES, {"image": ""}, "--image=<registry/rl-code:1> is missing"),
        (KUBERNETES, {"claim": ""}, "--claim=<the volume's claim> is missing"),
        (KUBERNETES, {"name": "My_Run"}, "--name=My_Run must be small letters"),
        (KUBERNETES, {"workdir": "/other/x"}, "--workdir=/other/x is not below --mount=/shared"),
        (KUBERNETES, {"first_actor": 2}, "--first_actor=2: actors of a JobSet are named after it"),
        (KUBERNETES, {"role": "ray"}, "--cpus=<processors of a host> is missing; Ray's autoscaler"),
        (KUBERNETES, {"role": "ray", "cpus": 16}, "a job of Ray passes its words through a shell"),
        (
            KUBERNETES,
            {"network": "infiniband", "network_values": VALUES["infiniband"]},
            "--network=infiniband needs --network_value=resource=<value>",
        ),
        (
            KUBERNETES,
            {"network": "tpu_multislice", "role": "learner_and_actors"},
            "all slices of a JobSet are one program",
        ),
    ],
)
def test_a_value_that_is_missing_or_wrong_is_named(base, changes, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        render(dataclasses.replace(base, **changes))


def test_a_template_that_lacks_a_value_is_named():
    with pytest.raises(ConfigError, match=r"cluster/slurm/run\.sh: 'name' is undefined"):
        cluster_render.fill("slurm/run.sh", {"what": "", "logs": "", "array": False})


def cluster(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, with a workdir of its own."""
    line = ["--config=configs/faults.py:smoke", f"--workdir={folder / 'run'}", *arguments]
    return programs.run("launch.cluster", *line, env=os.environ | environment)


def test_the_command_renders_from_the_config_and_submits(tmp_path):
    (tmp_path / "sbatch").write_text(
        '#!/bin/sh\necho "$@" >>"$(dirname "$0")/submitted"; echo 17\n'
    )
    (tmp_path / "sbatch").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    line = ["--role=actors", "--actors=2", "--config.train.steps=5", "--cpus=2"]
    dry = cluster(tmp_path, *line, "--dry_run", f"--out={tmp_path / 'out'}", PATH=path)
    assert dry.returncode == 0, dry.stderr
    assert "----- actors.sh" in dry.stdout and not (tmp_path / "submitted").exists()
    assert not (tmp_path / "run").exists()
    done = cluster(tmp_path, *line, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "17"
    assert (tmp_path / "submitted").read_text() == "--parsable actors.sh\n"
    script = (tmp_path / "run" / "cluster" / "run-actors" / "actors.sh").read_text()
    assert script == (tmp_path / "out" / "actors.sh").read_text()
    (words,) = commands(script)
    assert {"--config=configs/faults.py:smoke", "--config.train.steps=5"} <= set(words)


def test_what_the_config_cannot_do_is_refused(tmp_path):
    done = cluster(tmp_path, "--role=learner", "--config.asynchrony.mode=sync", "--dry_run")
    assert done.returncode == 2, done.stdout
    assert "asynchrony.mode = 'sync'" in " ".join(done.stderr.split())
    path = str(ROOT / "configs" / "faults.py")
    config = faults.get_config("smoke")
    with pytest.raises(ConfigError, match=r"faults\.py defines no get_sweep\(\)"):
        launch_cluster.members(config, path, "/shared/x")
    assert launch_cluster.members(config, str(ROOT / "configs/ablation.py"), "/shared/x") == 9
    config.mesh.data = 4
    run_config = read_config.build(RunConfig, config)
    assert launch_cluster.check_devices(run_config, "learner", hosts=2, devices=2) == 2
    assert launch_cluster.check_devices(run_config, "learner", hosts=1, devices=0) == 0
    # no more than the meshes use, and all where a mesh takes what is left
    assert launch_cluster.check_devices(run_config, "learner", hosts=1, devices=8) == 4
    assert launch_cluster.check_devices(run_config, "actor", hosts=1, devices=8) == 1
    config.mesh.data = 0
    every = read_config.build(RunConfig, config)
    assert launch_cluster.check_devices(every, "learner", hosts=1, devices=8) == 8
    complaint = "1 hosts with --devices=2 have 2, and the meshes of the role learner need 4"
    with pytest.raises(ConfigError, match=complaint):
        launch_cluster.check_devices(run_config, "learner", hosts=1, devices=2)


ONE_ACTOR = dict(devices=8, prefill=True, used={"actor": 1, "prefill": 2})


def test_a_role_asks_slurm_for_as_many_devices_as_it_uses():
    job = dataclasses.replace(SLURM, role="learner_and_actors", actors=2, **ONE_ACTOR)
    script = render(job)["learner_and_actors.sh"]
    asked = [one for one in options(script) if one.startswith("--gpus-per-node")]
    assert asked == [f"--gpus-per-node={count}" for count in (8, 1, 1, 2)]
    assert "export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7\n" in script
    assert "export JAX_LOCAL_DEVICE_IDS=0; exec" in script
    assert "export JAX_LOCAL_DEVICE_IDS=0,1; exec" in script
    alone = render(dataclasses.replace(job, role="actors", prefill=False))["actors.sh"]
    assert "--gpus-per-node=1" in options(alone) and "JAX_LOCAL_DEVICE_IDS=0\n" in alone


def test_a_pod_asks_for_what_its_role_uses_and_may_make_sandboxes():
    job = dataclasses.replace(KUBERNETES, role="learner_and_actors", actors=2, **ONE_ACTOR)
    made = manifests(render(job)["jobset.yaml"])["JobSet"]["spec"]["replicatedJobs"]
    containers = {
        one["name"]: one["template"]["spec"]["template"]["spec"]["containers"][0] for one in made
    }
    asked = {name: one["resources"]["limits"]["nvidia.com/gpu"] for name, one in containers.items()}
    assert asked == {"learner": "8", "actor": "1", "prefill": "2"}
    for name, one in containers.items():
        if name == "prefill":  # runs nothing that a model wrote
            assert "securityContext" not in one
            continue
        may = one["securityContext"]
        assert may["runAsUser"] == 0 and may["capabilities"]["add"] == ["SYS_ADMIN"]
        assert may["seccompProfile"] == may["appArmorProfile"] == {"type": "Unconfined"}


def test_the_page_has_the_table_of_networks():
    page = (ROOT / "docs" / "operations.md").read_text()
    for name, entry in networks().items():
        for variable in entry["variables"]:
            row = f"| `{name}` | `{variable['name']}` | `{variable['value']}` | {variable['why']} |"
            assert row in page, row
            assert variable["source"] in page


def test_every_network_says_what_it_needs():
    assert {name for name in networks() if name != "gpu"} == set(VALUES)
    for entry in networks().values():
        names = set(re.findall(r"{(\w+)}", json.dumps([entry["variables"], entry.get("sbatch")])))
        assert names <= {*entry.get("values", {}), "hosts"}
        assert all(v["source"].startswith("https://") and v["why"] for v in entry["variables"])
