"""Every job for a device runs at a small size on CPU and writes the numbers that it is asked for."""

from __future__ import annotations

import inspect
import re

import jax
import pytest
from absl import flags

from benchmarks import device_jobs
from benchmarks import model as bench_model
from benchmarks.budgets import RESULTS, Lines, read
from benchmarks.device_jobs import JOBS, CannotRun, DeviceJob
from launch import on_device
from models.families import PRESETS
from models.sharding import MeshConfig, make_mesh
from tests import programs
from tests.models.small import SHALLOW

# What is asked of each job; the others are these with other flags of XLA, or are tested with the
# bench that they call.
ASKED = {
    "device": {"hardware", "versions", "memory_gb_per_s", "product_tflop_per_s"},
    "checks": {"error", "bound", "right", "wrong"},
    "sampling_135m": {
        *("decoded_per_s", "share_of_bound", "step_ms", "between_dispatches_ms"),
        *("launches_a_step", "again_a_step", "moved_gb"),
    },
    "training": {"mfu", "update_s", "tokens_per_s", "planned_gb", "program_gb"},
    "grpo": {"step", "generation", "update"},
    "attention": {"seconds", "keys", "decoding"},
    "weights": {"learner_held_up_s", "read_s", "from_publish_to_loaded_s", "gb"},
}


@pytest.fixture(scope="module", autouse=True)
def own_flags():
    """The command's flags, in place of those that others have of the same names."""
    source = inspect.getsource(on_device.define_flags)
    names = re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source)
    known = {name: flags.FLAGS[name] for name in names if name in flags.FLAGS}
    for name in known:
        delattr(flags.FLAGS, name)
    on_device.define_flags()
    yield
    for name in names:
        delattr(flags.FLAGS, name)
    for name, flag in known.items():
        flags.FLAGS[name] = flag


def rehearse(job: DeviceJob, folder) -> list[dict]:
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["on_device", f"--out={folder}", "--rehearse", *job.flags(rehearse=True)])
    assert device_jobs.work(job, Lines(folder / RESULTS, job.name), rehearse=True) == 0
    return [line for line in read(folder / RESULTS) if line["job"] == job.name]


@pytest.mark.long
@pytest.mark.parametrize("name", ASKED)
def test_a_job_writes_what_it_is_asked_for(name, tmp_path, monkeypatch):
    one = make_mesh(MeshConfig(data=1, tensor=1), jax.devices()[:1])
    monkeypatch.setattr(bench_model, "all_devices", lambda: one)
    monkeypatch.setitem(PRESETS, "tiny", SHALLOW)
    (job,) = (job for job in JOBS if job.name == name)
    lines = rehearse(job, tmp_path)
    assert ASKED[name] <= {key for line in lines for key in line}
    assert all(line.get("right", True) for line in lines)


def test_what_a_job_lacks_is_a_line(tmp_path):
    def run(line):
        line(begun=True)
        raise CannotRun("no weights: fetch them")

    def too_large(line):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    for name, job, lines in (
        ("a", run, [{"begun": True}, {"cannot": "no weights: fetch them"}]),
        ("b", too_large, [{"cannot": "RESOURCE_EXHAUSTED: out of memory"}]),
    ):
        line = Lines(tmp_path / name, name)
        assert device_jobs.work(DeviceJob(name, "", job, 1.0, 1.0), line, rehearse=True) == 1
        assert read(tmp_path / name) == [{"job": name, **one} for one in lines]


def test_a_bug_keeps_its_traceback(tmp_path):
    def run(line):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        device_jobs.work(
            DeviceJob("a", "", run, 1.0, 1.0), Lines(tmp_path / "a", "a"), rehearse=True
        )


@pytest.mark.parametrize(
    "words, says",
    [
        (["--only=sampling"], "--only=sampling must be of device, checks"),
        ([], "--out=<folder> is missing"),
    ],
)
def test_a_wrong_command_line_is_refused(words, says):
    done = programs.run("launch.on_device", *words)
    assert done.returncode == 2 and says in done.stderr


def test_results_are_not_written_over(tmp_path):
    (tmp_path / RESULTS).write_text("")
    done = programs.run("launch.on_device", f"--out={tmp_path}")
    assert done.returncode == 2 and "has results already" in done.stderr


def test_jobs_are_in_the_order_of_the_page():
    """The names stand in docs/on_device.md in the order in which they run."""
    page = (device_jobs.ROOT / "docs" / "on_device.md").read_text()
    places = [page.find(f"| `{job.name}` |") for job in JOBS]
    assert -1 not in places and places == sorted(places)
