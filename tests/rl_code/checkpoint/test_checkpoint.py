"""Properties of checkpoints: exact, atomic, and honest about damage."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rl_code.checkpoint import checkpoint
from rl_code.checkpoint import record as checkpoint_record
from rl_code.checkpoint.arrays import flatten
from rl_code.checkpoint.checkpoint import CheckpointError, Checkpoints
from rl_code.config import read_config
from tests import programs

CONFIG = {"seed": 0, "steps": 10, "loss": {"clip_high": 0.28, "clip_low": 0.2}}


@functools.cache
def make_state(seed: int = 0) -> dict:
    """A state with everything a run has: an nnx model, optimizer moments, random keys, bfloat16, an
    empty array.
    """
    model = nnx.Linear(8, 64, rngs=nnx.Rngs(seed))
    return {
        "model": model,
        "opt_state": optax.adamw(1e-3).init(model),
        "key": jax.random.key(seed + 3),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 4),
        "half": jax.random.normal(jax.random.key(seed), (5, 3), jnp.bfloat16),
        "special": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32),
        "empty": jnp.zeros((0, 3), jnp.int32),
    }


def leaves(state) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]


def assert_identical(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(
        x.dtype == y.dtype for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.shape == y.shape and x.tobytes() == y.tobytes()


def save_steps(workdir: Path, *numbers: int, keep: int = 2) -> None:
    with Checkpoints(workdir, CONFIG, keep=keep) as checkpoints:
        for step in numbers:
            checkpoints.save(step, make_state(step), {"tasks_used": step})


def data_files(workdir: Path, step: int) -> list[Path]:
    folder = workdir / "checkpoints" / f"step_{step:08d}"
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_restored_is_bit_identical(tmp_path):
    save_steps(tmp_path, 3)
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        for abstract in (make_state(7), jax.eval_shape(make_state.__wrapped__)):
            restored = checkpoints.restore(abstract)
            assert restored.step == 3 and restored.position == {"tasks_used": 3}
            assert_identical(restored.state, make_state(3))


def test_a_fresh_workdir_restores_nothing(tmp_path):
    with Checkpoints(tmp_path, CONFIG, keep=1) as checkpoints:
        assert checkpoints.restore(make_state()) is None


def test_donating_right_after_save_does_not_change_what_is_saved(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.5 + 1, tree), donate_argnums=0)
    state = {f"w{i}": jax.random.normal(jax.random.key(i), (512, 512)) for i in range(8)}
    expected = {}
    with Checkpoints(tmp_path, CONFIG, keep=4) as checkpoints:
        for number in range(4):
            expected[number] = jax.tree.map(lambda x: np.array(x, copy=True), state)
            checkpoints.save(number, state, {})
            for _ in range(5):
                state = step(state)
    for number, arrays in expected.items():
        assert_identical(
            checkpoint.load(tmp_path, state, step=number).state, jax.tree.map(jnp.asarray, arrays)
        )


def test_position_is_what_it_was_when_saved(tmp_path):
    position = {"pool": [1, 2]}
    with Checkpoints(tmp_path, CONFIG, keep=1) as checkpoints:
        checkpoints.save(0, {"x": jnp.ones(3)}, position)
        position["pool"].append(3)
    assert checkpoint.load(tmp_path, {"x": jnp.ones(3)}).position == {"pool": [1, 2]}


def test_arrays_come_back_in_the_asked_sharding(tmp_path):
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = {"x": jnp.arange(8.0 * len(devices)), "key": jax.random.key(1)}
    with Checkpoints(tmp_path, CONFIG, keep=1) as checkpoints:
        checkpoints.save(0, state, {})
        shardings = {
            "x": NamedSharding(mesh, PartitionSpec("data")),
            "key": NamedSharding(mesh, PartitionSpec()),
        }
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(lambda: state),
            shardings,
        )
        restored = checkpoints.restore(abstract).state
    assert restored["x"].sharding == shardings["x"]
    assert_identical(restored, state)


def test_only_the_newest_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert not data_files(tmp_path, 2)


def test_part_of_the_state_can_be_read_while_a_run_holds_the_workdir(tmp_path):
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        checkpoints.save(0, make_state(5), {})
        checkpoints.wait()
        model = checkpoint.load(tmp_path, {"model": make_state(0)["model"]}, partial=True).state[
            "model"
        ]
    assert_identical(model, make_state(5)["model"])


def test_the_model_is_read_by_name_without_a_config(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoint.load_parameters(tmp_path)
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        found = checkpoint.load_parameters(tmp_path, None if step == 2 else step)
        assert (found.step, found.config) == (step, CONFIG)
        expected = flatten(make_state(step)["model"])
        assert found.arrays.keys() == expected.keys()
        for name, x in found.arrays.items():
            assert x.dtype == expected[name].dtype
            assert np.asarray(x).tobytes() == np.asarray(expected[name]).tobytes()
    os.truncate(data_files(tmp_path, 2)[0], 0)  # falls back, as a run that continues does
    assert checkpoint.load_parameters(tmp_path).step == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step=3"):
        checkpoint.load_parameters(tmp_path, 3)


def test_the_best_is_kept_beside_the_newest_and_found_by_its_score(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoint.load_parameters(tmp_path, "best")
    with Checkpoints(tmp_path, CONFIG, keep=1) as checkpoints:
        for step, score in enumerate([0.1, 0.9, 0.3, 0.2]):
            checkpoints.save(step, make_state(step), {}, score)
            assert len(list((tmp_path / "checkpoints").glob("step_*"))) <= 4
    assert checkpoint.steps(tmp_path) == [1, 3]
    assert checkpoint.load_parameters(tmp_path, "best").step == 1
    assert checkpoint.load_parameters(tmp_path, "newest").step == 3
    save_steps(tmp_path / "unscored", 1)
    with pytest.raises(CheckpointError, match=r"has a score; set checkpoint\.best"):
        checkpoint.load_parameters(tmp_path / "unscored", "best")


@pytest.mark.long
def test_large_files_are_not_read_again_and_damage_in_them_is_found_in_the_arrays(
    tmp_path, monkeypatch, caplog
):
    read = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    monkeypatch.setattr(checkpoint_record, "_SMALL_BYTES", -1)
    save_steps(tmp_path, 1, 2)
    assert checkpoint.load(tmp_path, make_state()).step == 2 and not read
    monkeypatch.undo()
    # Bits that storage hands over without an error of its own are still found.
    record = checkpoint_record.read(tmp_path / "checkpoints" / "step_00000002")
    name = next(name for name in record.checksums if name.startswith("model."))
    wrong = {**record.checksums, name: "0" * 16}
    (tmp_path / "checkpoints" / "step_00000002" / "record.json").unlink()
    checkpoint_record.write(
        tmp_path / "checkpoints" / "step_00000002", dataclasses.replace(record, checksums=wrong)
    )
    assert checkpoint.load(tmp_path, make_state()).step == 1
    assert f"{name} have changed since they were written" in caplog.text
    # A flipped byte in the files of the arrays is noticed whether or not they have a CRC.
    save_steps(tmp_path / "flipped", 1)
    monkeypatch.setattr(checkpoint_record, "_SMALL_BYTES", -1)
    with Checkpoints(tmp_path / "flipped", CONFIG, keep=2) as checkpoints:
        checkpoints.restore(make_state())
        checkpoints.save(2, make_state(2), {})
    for path in data_files(tmp_path / "flipped", 2):
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 3)):
            damaged = bytearray(content)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            try:
                restored = checkpoint.load(tmp_path / "flipped", make_state())
            finally:
                path.write_bytes(content)
            # what says nothing about the arrays may change; the arrays never do
            assert_identical(restored.state, make_state(restored.step))
    gc.collect()  # Orbax's other reads tell of their errors now, and not after pytest's summary


def test_processes_that_do_not_reach_each_other_are_no_damage(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2)

    def restore(self, *args, **named):
        raise ValueError("UNKNOWN: Gloo all-reduce failed: connection refused")

    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", restore)
    with pytest.raises(CheckpointError, match=r"Delete the folder"):
        checkpoint.load(tmp_path, make_state())
    monkeypatch.setattr(checkpoint.jax, "process_count", lambda: 2)
    with pytest.raises(CheckpointError, match=r"the 2 processes .* The checkpoint is kept") as told:
        checkpoint.load(tmp_path, make_state())
    assert "Delete" not in str(told.value)


@pytest.mark.parametrize("keep_bytes", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_falls_back_to_the_older_checkpoint(tmp_path, keep_bytes, caplog):
    save_steps(tmp_path, 1, 2)
    biggest = max(data_files(tmp_path, 2), key=lambda path: path.stat().st_size)
    os.truncate(biggest, int(biggest.stat().st_size * keep_bytes))
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        restored = checkpoints.restore(make_state())
        assert restored.step == 1
        assert_identical(restored.state, make_state(1))
        assert "step 2 is damaged" in caplog.text and biggest.name in caplog.text
        checkpoints.save(2, make_state(2), {})  # the run reaches the step again
    assert checkpoint.load(tmp_path, make_state()).step == 2


def test_any_damaged_file_is_noticed(tmp_path):
    save_steps(tmp_path, 1, 2)
    assert "record.json" in [path.name for path in data_files(tmp_path, 2)]
    for path in data_files(tmp_path, 2):
        content = path.read_bytes()
        for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert checkpoint.load(tmp_path, make_state()).step == 1, path
        path.write_bytes(content)
    assert checkpoint.load(tmp_path, make_state()).step == 2


def test_nothing_readable_is_an_error_not_a_fresh_start(tmp_path):
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        os.truncate(data_files(tmp_path, step)[0], 0)
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        with pytest.raises(
            CheckpointError, match=r"no checkpoint .* can be read: step 2: .*; step 1: "
        ):
            checkpoints.restore(make_state())


def test_another_config_in_the_workdir_is_refused_by_name(tmp_path):
    save_steps(tmp_path, 1)
    other = {**CONFIG, "steps": 20, "loss": {"clip_high": 0.3, "clip_low": 0.2}}
    with pytest.raises(
        read_config.ConfigError, match=r"loss\.clip_high = 0\.28 there, 0\.3 here"
    ) as error:
        Checkpoints(tmp_path, other, keep=2, may_change=("steps",))
    assert "steps" not in str(error.value) and "clip_low" not in str(error.value)
    with Checkpoints(tmp_path, other, keep=2, may_change=("steps", "loss")) as checkpoints:
        assert checkpoints.restore(make_state()).step == 1


def test_a_state_of_another_shape_is_named(tmp_path):
    save_steps(tmp_path, 1)
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        with pytest.raises(
            ValueError, match=r"half: expected float32\[5\], found bfloat16\[5, 3\]"
        ):
            checkpoints.restore({**make_state(), "half": jnp.zeros(5)})
        with pytest.raises(ValueError, match=r"extra: expected .*, found nothing"):
            checkpoints.restore({**make_state(), "extra": jnp.zeros(5)})
        with pytest.raises(ValueError, match="has half, which the state does not have"):
            checkpoints.restore({k: v for k, v in make_state().items() if k != "half"})
    assert checkpoint._methods_of(["model.layers.0.gates.value", "half"]) == (
        "; layers have it where model.attention is nsa or gated_documents"
    )


def test_what_cannot_be_stored_is_refused_when_saved(tmp_path):
    with Checkpoints(tmp_path, CONFIG, keep=1) as checkpoints:
        with pytest.raises(TypeError, match="state leaf n is int"):
            checkpoints.save(0, {"n": 1}, {})
        with pytest.raises(TypeError):
            checkpoints.save(0, {"n": jnp.ones(1)}, {"rng": object()})


def test_saving_over_a_run_that_was_not_restored_is_refused(tmp_path):
    save_steps(tmp_path, 5)
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        with pytest.raises(ValueError, match="restore it first"):
            checkpoints.save(1, make_state(), {})
        checkpoints.restore(make_state())
        checkpoints.save(5, make_state(9), {})
    assert_identical(checkpoint.load(tmp_path, make_state()).state, make_state(5))


def test_a_second_process_in_the_same_workdir_is_refused(tmp_path):
    with Checkpoints(tmp_path, {}, keep=1):
        run = programs.run("tests.rl_code.checkpoint.second_process", tmp_path)
    assert run.returncode == 1 and "another process is running in" in run.stderr


@pytest.fixture
def file_size_limit():
    """Makes every write past a file size fail, which storage reports the way it reports a full
    disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_failed_write_leaves_the_older_checkpoint_good_and_the_next_save_works(
    tmp_path, file_size_limit
):
    states = [{"x": jax.random.normal(jax.random.key(i), (256, 256))} for i in range(3)]
    with Checkpoints(tmp_path, CONFIG, keep=1) as checkpoints:
        checkpoints.save(0, states[0], {})
        checkpoints.wait()
        file_size_limit(100_000)
        with pytest.raises(CheckpointError, match=r"step 1 .* step 0 is still good"):
            checkpoints.save(1, states[1], {})
            checkpoints.wait()
        assert_identical(checkpoints.restore(states[0]).state, states[0])
        file_size_limit(resource.RLIM_INFINITY)
        checkpoints.save(2, states[2], {})
    assert_identical(checkpoint.load(tmp_path, states[0]).state, states[2])
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*1*")] == []


FULL_DISK = """
import sys, jax
from rl_code.checkpoint.checkpoint import CheckpointError, Checkpoints
state = {"x": jax.random.normal(jax.random.key(0), (1024, 256))}
checkpoints = Checkpoints(sys.argv[1], {}, keep=9)
try:
    for step in range(9):
        checkpoints.save(step, state, {})
        checkpoints.wait()
except CheckpointError as error:
    restored = checkpoints.restore(state)
    same = bool((restored.state["x"] == state["x"]).all())
    print("RESULT", step, restored.step, same, error)
"""


@pytest.mark.long
def test_a_full_disk_is_named_and_the_older_checkpoint_is_good(tmp_path):
    command = f'mount -t tmpfs -o size=3m none "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}/run"'
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces are not allowed here, so no small disk can be made")
    run = subprocess.run(
        [*unshare, "bash", "-c", command, FULL_DISK], capture_output=True, text=True
    )
    result = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert result, run.stderr
    _, failed, restored, same, message = result[0].split(maxsplit=4)
    assert int(restored) == int(failed) - 1 and same == "True"
    assert "the disk is full" in message and f"step {restored} is still good" in message


# The parent imports once, then forks a run per kill point before any jax backend exists.
KILLED = """
import os, random, signal, sys, time
import jax.numpy as jnp, numpy as np
from rl_code.checkpoint import checkpoint
workdir, kills = sys.argv[1], int(sys.argv[2])

def run(ready, last):
    state = {"x": jnp.asarray(np.zeros((16, 1024)))}
    with checkpoint.Checkpoints(workdir, {}, keep=2) as checkpoints:
        restored = checkpoints.restore(state)
        used = restored.position["used"] if restored else []
        state = restored.state if restored else state
        assert not restored or used == list(range(restored.step)), used
        for step in range(len(used), last):
            os.write(ready, b"x")
            state = {"x": jnp.asarray(np.cos(np.asarray(state["x"]) + step))}
            used.append(step)
            checkpoints.save(step + 1, state, {"used": used})

chance = random.Random(0)
for kill in range(kills + 1):
    read, write = os.pipe()
    last = 10**6 if kill < kills else max(checkpoint.steps(workdir), default=0) + 2
    child = os.fork()
    if child == 0:
        try:
            run(write, last)
            os._exit(0)
        except BaseException as error:
            print(f"run {kill}: {error!r}", flush=True)
            os._exit(1)
    os.close(write)
    if kill < kills:  # after one to three steps, anywhere between two of them
        for _ in range(chance.randint(2, 4)):
            started = time.perf_counter()
            os.read(read, 1)
        time.sleep(chance.uniform(0.0, 1.0) * (time.perf_counter() - started))
        os.kill(child, signal.SIGKILL)
    print("ENDED", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.long
def test_killed_at_any_moment_a_run_continues_bit_identically(tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), "12"]
    run = subprocess.run(arguments, capture_output=True, text=True)
    ends = [line.split()[1] for line in run.stdout.splitlines() if line.startswith("ENDED")]
    assert ends == ["-9"] * 12 + ["0"], run.stdout + run.stderr

    state = np.zeros((16, 1024), np.float32)
    finished = checkpoint.load(tmp_path, {"x": jnp.asarray(state)})
    assert finished.step > 10 and finished.position == {"used": list(range(finished.step))}
    for step in range(finished.step):
        state = np.cos(state + step)
    assert_identical(finished.state["x"], jnp.asarray(state))


def test_an_unfinished_save_is_cleared_away(tmp_path):
    save_steps(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    # killed between the arrays and the record
    (folder / "step_00000002" / "record.json").rename(
        folder / "step_00000002" / ".record.json.partial"
    )
    (folder / "step_00000003.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, CONFIG, keep=2) as checkpoints:
        assert checkpoints.restore(make_state()).step == 1
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_00000001"]
