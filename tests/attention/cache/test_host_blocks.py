"""Blocks in host memory and on disk come back as they were, and what goes wrong in a thread is not
lost.
"""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache.host_blocks import HostBlocks
from attention.cache.storage import CorruptedFile

SIZE = 2 * 6 * 4


def block(number: int):
    return jnp.full((1, 3, 2), number, jnp.float32), jnp.full((1, 3, 2), -number, jnp.float32)


def write(blocks: HostBlocks, key: tuple[int, ...], number: int) -> None:
    blocks.write([key], tuple(x[None] for x in block(number)))


def test_the_least_recently_read_go_to_disk(tmp_path):
    blocks = HostBlocks(tmp_path, 2 * SIZE, workers=1)
    for number in range(2):
        write(blocks, (0, number), number)
    blocks.flush()
    blocks.read([(0, 0)])
    write(blocks, (0, 2), 2)
    for number in (0, 2):
        assert np.array_equal(blocks.send((0, number)).result(), block(number))
    assert blocks.metrics()["from_disk_bytes"] == 0 and blocks.metrics()["disk_blocks"] == 1
    assert np.array_equal(blocks.read([(0, 1)]), [block(1)])
    metrics = blocks.metrics()
    assert (
        metrics["from_disk_bytes"] == metrics["to_disk_bytes"] == SIZE
        and metrics["host_bytes"] == 2 * SIZE
    )
    assert metrics["to_host_bytes"] == 3 * SIZE and metrics["to_device_bytes"] == 4 * SIZE
    blocks.forget({(0, 0), (0, 1), (0, 2)})
    assert blocks.metrics()["host_bytes"] == blocks.metrics()["disk_blocks"] == 0
    blocks.close()


def test_many_writes_and_reads_at_once_lose_nothing(tmp_path):
    rng = np.random.default_rng(0)
    expected = {}
    blocks = HostBlocks(tmp_path, 3 * SIZE, workers=4)
    for number in range(300):
        key = (int(rng.integers(12)),)
        if rng.random() < 0.5:
            more = (key[0] + 100,)
            blocks.write(
                [key, more],
                tuple(jnp.stack(x) for x in zip(block(number), block(-number), strict=True)),
            )
            expected |= {key: number, more: -number}
        elif rng.random() < 0.1:
            blocks.forget({key} & expected.keys())
            expected.pop(key, None)
        else:
            keys = [key for key in expected if rng.random() < 0.3]
            for found, wanted in zip(
                blocks.read(keys), (block(expected[key]) for key in keys), strict=True
            ):
                assert np.array_equal(found, wanted)
    blocks.flush()
    metrics = blocks.metrics()
    assert metrics["host_bytes"] == 3 * SIZE and metrics["disk_blocks"] == len(expected) - 3
    assert (tmp_path / "blocks").stat().st_size <= (24 + 4) * SIZE  # places are used again
    blocks.close()
    assert list(tmp_path.iterdir()) == []


def test_blocks_of_another_shape_are_refused(tmp_path):
    blocks = HostBlocks(tmp_path, 0, workers=1)
    write(blocks, (0,), 1)
    blocks.write([(1,)], (jnp.zeros((1, 2)), jnp.zeros((1, 2))))
    with pytest.raises(ValueError, match=r"\(1,\): arrays of .* in a file of .*"):
        blocks.close()


def test_the_last_write_counts(tmp_path):
    blocks = HostBlocks(tmp_path, 0, workers=4)  # everything goes to disk
    for number in range(20):
        write(blocks, (7,), number)
    assert np.array_equal(blocks.read([(7,)]), [block(19)])
    blocks.close()


def test_a_write_takes_the_place_of_one_that_failed(tmp_path):
    blocks = HostBlocks(tmp_path, 0, workers=2)
    write(blocks, (0,), 1)
    blocks.flush()  # else its thread may be the one that takes the wrong block to the disk
    wrong = blocks.write([(1,)], (jnp.zeros((1, 2)), jnp.zeros((1, 2))))
    assert wrong.exception() is not None
    with pytest.raises(ValueError, match=r"\(1,\): arrays of"):
        blocks.read([(1,)])
    write(blocks, (1,), 2)
    assert np.array_equal(blocks.read([(1,)]), [block(2)])
    blocks.close()


def test_blocks_whose_write_failed_can_be_forgotten(tmp_path, monkeypatch):
    blocks = HostBlocks(tmp_path, 0, workers=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        for number in range(3):
            write(blocks, (number,), number)
        with pytest.raises(OSError, match="No space left"):
            blocks.read([(1,)])
    blocks.forget({(0,), (1,), (2,)})
    assert blocks.metrics()["host_bytes"] == 0
    write(blocks, (3,), 3)
    assert np.array_equal(blocks.read([(3,)]), [block(3)])
    assert (tmp_path / "blocks").stat().st_size == SIZE  # the failed writes took no place
    blocks.close()


def test_a_damaged_block_is_noticed(tmp_path):
    blocks = HostBlocks(tmp_path, 0, workers=1)
    write(blocks, (3, 4), 1)
    blocks.read([(3, 4)])
    content = bytearray((tmp_path / "blocks").read_bytes())
    content[SIZE // 2] ^= 1
    for damaged in (content, content[:-1]):
        (tmp_path / "blocks").write_bytes(damaged)
        with pytest.raises(CorruptedFile, match=r"\(3, 4\) is not what was written"):
            blocks.read([(3, 4)])
    blocks.close()


def test_a_write_that_fails_is_told(tmp_path):
    blocks = HostBlocks(tmp_path / "blocks", 0, workers=1)
    (tmp_path / "blocks").rmdir()
    (tmp_path / "blocks").write_text("in the way")
    write(blocks, (0,), 1)
    with pytest.raises(Exception, match="blocks"):
        blocks.close()
