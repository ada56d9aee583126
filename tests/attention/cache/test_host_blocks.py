"""Blocks in host memory and on disk come back as they were, and what goes wrong in a thread is not lost."""

from __future__ import annotations

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
    assert metrics["from_disk_bytes"] == metrics["to_disk_bytes"] == SIZE and metrics["host_bytes"] == 2 * SIZE
    assert metrics["to_host_bytes"] == 3 * SIZE and metrics["to_device_bytes"] == 4 * SIZE
    blocks.forget({(0, 0), (0, 1), (0, 2)})
    assert blocks.metrics()["host_bytes"] == blocks.metrics()["disk_blocks"] == 0
    blocks.close()


def test_the_last_write_counts(tmp_path):
    blocks = HostBlocks(tmp_path, 0, workers=4)  # everything goes to disk
    for number in range(20):
        write(blocks, (7,), number)
    assert np.array_equal(blocks.read([(7,)]), [block(19)])
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
