"""Plans on which mesh a model is trained and sampled from: what fits, and how fast it can be.

python -m launch.plan --model=qwen3-32b --chip=gb200 --devices=72 --tokens=1179648
python -m launch.plan --model=qwen3-8b --chip=h100 --devices=8 --compile=1 --json=runs/plan.json
python -m launch.plan --published

Every mesh of --devices is looked at for the learner, and of --actor_devices for the actor, or those
that --mesh and --actor_mesh name. Those that fit into memory are sorted by the least time that one
step can take: the time of the slowest of compute, HBM, links and network, each at its peak rate. No
program reaches these rates, so the table compares meshes and bounds what is possible; it predicts
no speed.

With --compile=n the best n meshes of each role are compiled ahead of time on this machine, a whole
GRPO step and a decode step, and the compiled programs' own numbers stand in the table. It needs the
compilers: pip install -e .[aot]. The column "from" says what was compiled.

--published puts the throughput that other systems have published beside its bound, and says which
of their settings are assumed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.markup import escape

from attention.methods.api import METHODS
from attention.methods.method import Method
from benchmarks.results import save
from launch import command
from launch.command import console
from models.families import PRESETS
from models.sharding import MeshConfig
from planner import arithmetic, compiled, published, table
from planner.targets import INSTALL, TARGETS, is_installed
from planner.workload import Documents, Estimate, Workload
from rl_code.config.named import Named, make

ROOT = Path(__file__).resolve().parents[1]
_ANSWER = "plan: "
# Meshes of each role that the table shows.
_SHOWN = 6
# Rows of at least so many tokens may be cut over devices.
_LONG = 2**15

FLAGS = flags.FLAGS


def main(argv: Sequence[str]) -> None:
    if FLAGS.published:
        show_published()
        return
    if FLAGS.model not in PRESETS:
        command.refuse(f"--model={FLAGS.model} must be one of {', '.join(PRESETS)}")
    if FLAGS.tokens % FLAGS.context:
        command.refuse(f"--tokens={FLAGS.tokens} must be a multiple of --context={FLAGS.context}")
    if FLAGS.targets and FLAGS.targets > FLAGS.context:
        command.refuse(f"--targets={FLAGS.targets} must be at most --context={FLAGS.context}")
    check_rows()
    job = job_of_flags()
    if FLAGS.worker:
        done = compiled.compiled(job, table.from_json(json.loads(FLAGS.worker)))
        print(_ANSWER + json.dumps(table.to_json(done)), flush=True)
        return
    if FLAGS.compile and (missing := [x for x in job.target.packages if not is_installed(x)]):
        command.refuse(f"--compile={FLAGS.compile}: {', '.join(missing)} not installed: {INSTALL}")
    actors = FLAGS.actor_devices or FLAGS.devices
    experts = job.model.moe is not None
    learners = chosen("mesh", FLAGS.devices) or list(
        arithmetic.meshes(FLAGS.devices, fsdp=True, experts=experts, context=FLAGS.context >= _LONG)
    )
    samplers = chosen("actor_mesh", actors) or list(
        arithmetic.meshes(actors, fsdp=False, experts=experts)
    )
    count = f"{len(learners)} meshes for the learner, {len(samplers)} for the actor"
    console().print(f"{job.name} on {job.target.name}: {count}", style="dim")
    roles = {
        "learner": table.sorted_estimates(job, arithmetic.learner, learners),
        "actor": table.sorted_estimates(job, arithmetic.actor, samplers),
    }
    found: dict[str, list[Estimate]] = {}
    for role, (fitting, others) in roles.items():
        found[role] = [compile_apart(job, estimate) for estimate in fitting[: FLAGS.compile]]
        found[role] += fitting[FLAGS.compile : max(_SHOWN, FLAGS.compile)]
        console().print(table.table(role, job, found[role]))
        for reason, cut in others.items():
            console().print(escape(f"{reason}: {', '.join(cut)}"), style="dim")
    report(job, found)


def show_published() -> None:
    """--published: the table, and what it assumes."""
    found = [published.bound(row) for row in published.ROWS]
    console().print(published.table(found))
    console().print(escape("assumed of all rows:"))
    for line in published.ASSUMED:
        console().print(escape(f"- {line}"), highlight=False)
    rows = [published.to_json(one) for one in found]
    save({"assumed": published.ASSUMED, "published": rows})


def methods() -> tuple[Method, ...] | None:
    """--attention, as config.model.attention takes it on the command line."""
    text = FLAGS.attention
    if text is None:
        return None
    try:
        given = ast.literal_eval(text) if text.startswith("(") else text
    except (SyntaxError, ValueError):
        command.refuse(f"--attention={text} must be a name, or a tuple as \"('window', 'nsa')\"")
    several = given if isinstance(given, tuple) else (given,)
    try:
        names = [Named.from_config(one, "--attention") for one in several]
        return tuple(make(METHODS, name, "--attention") for name in names)
    except ValueError as error:
        command.refuse(str(error))


def check_rows() -> None:
    """--documents, --document_tokens and --prompts."""
    count, tokens = FLAGS.documents, FLAGS.document_tokens
    if count:
        given = f"--documents={count} of --document_tokens={tokens}"
        if count * tokens >= FLAGS.context:
            command.refuse(
                f"{given} are {count * tokens} tokens of a row: --context={FLAGS.context} must be "
                "more, since what follows the documents sees them"
            )
        if FLAGS.compile:
            command.refuse(f"{given} are counted by arithmetic alone: leave out --compile")
    if FLAGS.prompts:
        given = f"--prompts={FLAGS.prompts}"
        if FLAGS.prompts >= FLAGS.context:
            command.refuse(
                f"{given} are tokens of a row: --context={FLAGS.context}, with what follows them, "
                "must be more"
            )
        if count or "activations" in FLAGS.offload or FLAGS.compile:
            command.refuse(
                f"{given}: an update in two phases goes with none of --documents, "
                "--offload=activations and --compile"
            )


def job_of_flags() -> Workload:
    """The request of the flags."""
    own = {} if (found := methods()) is None else {"attention": found}
    try:
        shape = dataclasses.replace(PRESETS[FLAGS.model], **own)
    except ValueError as error:
        command.refuse(f"--model={FLAGS.model} with --attention={FLAGS.attention}: {error}")
    model = dataclasses.replace(
        shape,
        dtype="bfloat16",
        param_dtype=FLAGS.param_dtype,
        remat=True,
        remat_keeps=FLAGS.remat_keeps,
        offload_activations="activations" in FLAGS.offload,
    )
    if FLAGS.fold_experts:
        if model.moe is None:
            command.refuse(f"--fold_experts: {FLAGS.model} has no experts")
        moe = dataclasses.replace(model.moe, fold=True)
        model = dataclasses.replace(model, moe=moe, sequence_parallel=True)
    sizes = (FLAGS.tokens, FLAGS.context, FLAGS.rows)
    moments = "optimizer" in FLAGS.offload
    inside = Documents(FLAGS.documents, FLAGS.document_tokens) if FLAGS.documents else None
    own = dict(offload_moments=moments, targets=FLAGS.targets, documents=inside)
    own["prompts"] = FLAGS.prompts
    return Workload(FLAGS.model, model, TARGETS[FLAGS.chip], *sizes, **own)


def chosen(flag: str, devices: int) -> list[MeshConfig]:
    """The meshes that a flag names."""
    found = []
    for text in FLAGS[flag].value:
        try:
            found.append(table.named_mesh(text, devices))
        except ValueError as error:
            command.refuse(f"--{flag}={text} {error}")
        if flag == "actor_mesh" and (found[-1].fsdp, found[-1].context) != (None, None):
            command.refuse(f"--{flag}={text}: fsdp and context are for devices that learn")
    return found


def compile_apart(job: Workload, estimate: Estimate) -> Estimate:
    """The estimate with the compiled program's numbers, from a process of its own: a compiler may
    end it, and the GPU compiler keeps the first target that it was given.
    """
    console().print(f"compiling {estimate.role} on {table.words(estimate.mesh)}", style="dim")
    own = ("model", "chip", "tokens", "context", "rows", "param_dtype", "fold_experts")
    own += ("remat_keeps",) + (("targets",) if FLAGS.targets else ())
    given = [f"--{name}={FLAGS[name].value}" for name in own]
    given += [f"--offload={name}" for name in FLAGS.offload]
    given += [f"--attention={FLAGS.attention}"] if FLAGS.attention else []
    worker = f"--worker={json.dumps(table.to_json(estimate))}"
    done = subprocess.run(
        [sys.executable, "-m", "launch.plan", *given, worker],
        env=os.environ | job.target.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            return table.from_json(json.loads(line.removeprefix(_ANSWER)))
    last = (done.stderr.strip() or "no message").splitlines()[-1]
    return dataclasses.replace(estimate, source=f"arithmetic; not compiled: {last[:200]}")


def report(job: Workload, found: dict[str, list[Estimate]]) -> None:
    """The transfer of weights between the best meshes; --json."""
    seconds = None
    keys: list[str] = []
    if all(found.values()):
        best = found["learner"][0].mesh, found["actor"][0].mesh
        seconds = arithmetic.transfer_seconds(job, *best)
        learner, actor = map(table.words, best)
        words = f"new weights from {learner} to {actor}: at least {1e3 * seconds:,.1f} ms"
        console().print(f"{words} (arithmetic)")
        keys = table.config_flags(job, *best)
        if FLAGS.attention:
            keys.append(shlex.quote(f"--config.model.attention={FLAGS.attention}"))
        console().print("The first mesh of each role as keys of a config, to give with --config:")
        console().print(" ".join(keys), soft_wrap=True, highlight=False, markup=False)
    rows = {
        role: [table.to_json(x) | table.derived(job, x) for x in own] for role, own in found.items()
    }
    own = ("model", "chip", "tokens", "context", "rows", "fold_experts", "offload")
    own += ("targets", "remat_keeps", "documents", "document_tokens", "attention", "prompts")
    asked = {name: FLAGS[name].value for name in own}
    save({"asked": asked, "transfer_s": seconds, "config": keys, **rows})


def define_flags() -> None:
    """Flags of this command alone: other modules have some of the same name."""
    flags.DEFINE_string("model", None, f"Of {', '.join(PRESETS)}.")
    flags.DEFINE_enum("chip", "gb200", list(TARGETS), "The device.")
    flags.DEFINE_integer("devices", 8, "Devices that learn.", 1)
    flags.DEFINE_integer("actor_devices", None, "Devices that sample; by default as many.", 1)
    flags.DEFINE_integer("tokens", 2**20, "Tokens that one step trains on.", 1)
    flags.DEFINE_integer("context", 8192, "Tokens of a row.", 128)
    flags.DEFINE_integer(
        "targets", None, "Tokens of a row that are predicted; by default half of them.", 1
    )
    flags.DEFINE_string(
        "attention",
        None,
        "The methods of attention in place of the model's own, as config.model.attention takes "
        "them: nsa, or \"({'name': 'window', 'window': 512}, 'dense')\".",
    )
    flags.DEFINE_integer(
        "documents", 0, "Documents at the beginning of a row, each encoded alone (squid).", 0
    )
    flags.DEFINE_integer(
        "prompts",
        0,
        "Tokens of a row that are prompts of an update in two phases (train.pack.prompt_slots).",
        0,
    )
    flags.DEFINE_integer("document_tokens", 1024, "Tokens of each document.", 1)
    flags.DEFINE_enum(
        "remat_keeps",
        "nothing",
        ["nothing", "attention", "products"],
        "What a layer keeps for the backward pass (model.remat_keeps).",
    )
    flags.DEFINE_integer("rows", 64, "Rows that decode together on each shard of rows.", 2)
    flags.DEFINE_enum(
        "param_dtype", "float32", ["float32", "bfloat16"], "Of the learner's weights."
    )
    flags.DEFINE_multi_enum(
        "offload",
        [],
        ["optimizer", "activations"],
        "What of the learner waits in the host's memory. May be repeated.",
    )
    flags.DEFINE_bool(
        "fold_experts",
        False,
        "Cut whole experts over expert and tensor together, and activations by tokens "
        "(model.fold_experts, model.sequence_parallel).",
    )
    flags.DEFINE_bool(
        "published",
        False,
        "Print published throughput of other systems beside its bound, and nothing else.",
    )
    flags.DEFINE_integer("compile", 0, "Meshes of each role that are compiled ahead of time.", 0)
    flags.DEFINE_multi_string(
        "mesh", [], "Look at this mesh of the learner alone, as fsdp=9,tensor=8. May be repeated."
    )
    flags.DEFINE_multi_string("actor_mesh", [], "The same for the actor.")
    flags.DEFINE_string(
        "worker", None, "Compile this estimate (JSON) in this process and print it."
    )


if __name__ == "__main__":
    define_flags()
    command.run(main)
