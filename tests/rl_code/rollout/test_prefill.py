"""Prompts that another process prefills: its pages have the bits that a prefill here would write,
samples are the same, and nothing is lost when it is slow, of another version, or dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from attention.methods.gated_documents import GatedDocuments
from models.sharding import MeshConfig, make_mesh
from rl_code.environment.documents import OUTSIDE
from rl_code.rollout import prefill_wire
from rl_code.rollout.engine import Engine
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.prefill_client import PrefillClient, blocks_of
from rl_code.rollout.prefill_server import pieces_of
from rl_code.rollout.prefill_wire import PrefillConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.spans import Span
from tests import programs
from tests.rl_code.rollout.prefill_process import HOST, TASKS
from tests.rl_code.rollout.small import (
    ENGINE,
    METHODS,
    MODEL,
    ONE_LAYER,
    SAMPLING,
    SCARCE,
    STOP,
    VOCAB,
    Episode,
    Letters,
    assert_all_free,
    assert_same,
    engine_of,
    model_on,
    model_with,
    play,
    task_of,
)
from tests.rl_code.rollout.with_documents import WITH_DOCUMENTS

MODULE = "tests.rl_code.rollout.prefill_process"
PROMPT = np.random.default_rng(3).integers(1, VOCAB, 27).tolist()
# 12 tokens outside, a document of 7 tokens that fills two pages, 7 tokens outside
KINDS = [OUTSIDE] * 12 + [1] * 7 + [-1] + [OUTSIDE] * 7


def span_of(pool: PagePool, tokens: list[int], kinds: list[int] | None) -> Span:
    span = Span(prompt=len(tokens) + 1)
    span.runs = pool.runs()
    span.add(list(tokens), kinds)
    return span


def filled(pool: PagePool, model, tokens: list[int], kinds: list[int] | None) -> Span:
    """A span whose tokens are prefilled."""
    span = span_of(pool, tokens, kinds)
    pool.open(span)
    own = pool.engine.own(model_on(pool.engine.mesh, model))
    while span.missing:
        pool.prefill(own, [span])
    return span


def content(pool: PagePool, span: Span) -> list[np.ndarray]:
    """What the pages of a span hold, on the host."""
    pool.save(span, on_device=False)
    (block,) = span.saved
    return block


def handed_over(
    model, engine, kinds: list[int] | None, there: MeshConfig, here: MeshConfig
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the pages of a prompt hold where it was prefilled, and where they were handed to."""
    engines = {
        mesh: Engine(model, engine, SAMPLING, (STOP,), make_mesh(mesh)) for mesh in {there, here}
    }
    sender, receiver = PagePool(engines[there]), PagePool(engines[here])
    span = filled(sender, model, PROMPT, kinds)
    pieces, cuts = pieces_of(sender, span)
    device = receiver.engine.mesh.devices.flat[0]
    arrived = [jax.device_put(piece, device) for piece in pieces]
    count = len(prefill_wire.block_sizes(len(sender.pages(span))))
    # on other pages than there, but for those of the beginning, which are in the cache already
    other = filled(receiver, model, [*PROMPT[:9], *[STOP] * 18], kinds)
    taken = span_of(receiver, PROMPT, kinds)
    receiver.receive(taken, blocks_of(arrived, cuts, count))
    receiver.restore(taken)
    assert taken.cached == len(PROMPT) and not taken.missing
    if taken.shard == other.shard:
        mine, others = receiver.pages(taken), receiver.pages(other)
        assert mine[0] == others[0] and mine[-1] != others[-1]
    return content(sender, span), content(receiver, taken)


# Dense layers alone are handed to two shards, and from two parts of heads to two.
MESHES = ("two shards", "two parts of heads")
CASES = ("nsa and dense", "documents", *MESHES, "on pages", "states and dense", "latent")


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("name", CASES)
def test_pages_that_are_handed_over_have_the_bits_of_those_that_were_computed(name):
    attention, changes = METHODS.get(name, (MODEL.attention, {}))
    model = model_with(attention)
    engine = dataclasses.replace(ENGINE, prompt_length=32, **changes)
    kinds = None
    one = here = MeshConfig()
    if name == "documents":
        model = dataclasses.replace(MODEL, attention=(GatedDocuments(),))
        engine, kinds = WITH_DOCUMENTS, KINDS
    if name == "two shards":
        here = MeshConfig(data=2)
    if name == "two parts of heads":
        one = here = MeshConfig(tensor=2)
    there, arrived = handed_over(model, engine, kinds, one, here)
    assert len(there) == len(arrived)
    for x, y in zip(there, arrived, strict=True):
        assert x.any()
        np.testing.assert_array_equal(x, y[: len(x)])


def test_pages_travel_in_few_blocks_without_padding():
    for pages in range(1, 200):
        sizes = prefill_wire.block_sizes(pages)
        assert sum(sizes) == pages and len(sizes) <= pages.bit_length()
        assert all(size & (size - 1) == 0 for size in sizes)


class HereInstead:
    """A PrefillClient whose pages this process computes, once ``open`` is set."""

    def __init__(self, engine: Engine, models: dict):
        self._pool, self._models = PagePool(engine), models
        self.asked: dict[int, tuple] = {}
        self.versions: list[int] = []
        self.open = True

    def ask(self, tokens, kinds, version):
        self.versions.append(version)
        number = len(self.versions)
        self.asked[number] = (tokens, kinds, self._models[version])
        return number

    def collect(self):
        arrived = self.asked if self.open else {}
        return [(number, self._blocks(*arrived.pop(number))) for number in list(arrived)]

    def _blocks(self, tokens, kinds, model):
        span = span_of(self._pool, tokens, kinds)
        self._pool.new_weights()
        self._pool.open(span)
        own = self._pool.engine.own(model)
        while span.missing:
            self._pool.prefill(own, [span])
        pieces, cuts = pieces_of(self._pool, span)
        count = len(prefill_wire.block_sizes(len(self._pool.pages(span))))
        self._pool.release(span)
        return blocks_of(pieces, cuts, count)

    def wait(self, seconds):
        pass

    def drop(self, number):
        del self.asked[number]

    def close(self):
        self.asked.clear()


@pytest.mark.long
def test_prompts_on_their_way_are_asked_for_anew_with_new_weights_and_when_pages_run_out():
    engine = engine_of(ONE_LAYER, SCARCE)
    old = model_on(engine.mesh, ONE_LAYER)
    new = jax.tree.map(lambda x: -x, old)
    tasks = [task_of(seed) for seed in range(TASKS)]
    settings = dict(workers=4, worker_deadline_s=30.0)
    plain = Scheduler(engine, Letters(), **settings)
    alone, _ = plain.rollout(new, tasks, Episode, group_size=4, version=2, key=jax.random.key(7))
    plain.close()
    remote = HereInstead(engine, {1: old, 2: new})
    scheduler = Scheduler(engine, Letters(), **settings, remote=remote)
    scheduler.load(old, 1)
    words = jax.random.key_data(jax.random.key(7)).tolist()
    for number, task in enumerate(tasks):
        scheduler.submit(task, Episode, group=number, group_size=4, key=words, tag=number)
    remote.open = False
    scheduler.step()
    assert remote.asked and {*remote.versions} == {1}
    first = len(remote.versions)
    scheduler.load(new, 2)
    assert not remote.asked and not scheduler._open.asked
    remote.open = True
    groups = {}
    while scheduler.groups:
        groups |= scheduler.step()
    stats = scheduler.take_stats()
    assert_all_free(scheduler)
    scheduler.close()
    assert_same([groups[number] for number in range(TASKS)], alone)
    assert stats.preempted and {*remote.versions[first:]} == {2}
    assert len(remote.versions) >= first + TASKS and stats.prompts_by_itself == 0


@contextlib.contextmanager
def prefilling(workdir: Path, version: int = 1) -> Iterator:
    """A process that prefills with a version of the weights."""
    process = programs.start(MODULE, "prefill", workdir, version, devices=1)
    try:
        line = process.stdout.readline()
        assert line == "ready\n", line + process.stdout.read()
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_actors_sample_with_pages_of_a_third_process_what_one_alone_samples(tmp_path):
    with prefilling(tmp_path):
        actors = {
            name: programs.start(MODULE, "decode", tmp_path, name, devices=1) for name in "ab"
        }
        told = {name: process.communicate(timeout=200)[0] for name, process in actors.items()}
    groups, alone = play([task_of(seed) for seed in range(TASKS)], model=ONE_LAYER)
    prompts = sum(len(task_of(seed).prompt) - 1 for seed in range(TASKS))
    pages = sum(-(-(len(task_of(seed).prompt) - 1) // ENGINE.page) for seed in range(TASKS))
    for name, output in told.items():
        assert actors[name].returncode == 0, output
        counts = json.loads(output.splitlines()[-1])
        played = np.load(tmp_path / f"{name}.npz")
        for at, trajectory in enumerate(t for group in groups for t in group.trajectories):
            np.testing.assert_array_equal(played[f"tokens{at}"], trajectory.tokens)
            np.testing.assert_array_equal(played[f"logprobs{at}"], trajectory.logprobs)
        assert (counts["prompts_asked"], counts["prompts_by_itself"]) == (TASKS, 0)
        assert counts["received_tokens"] == prompts and counts["received_pages"] == pages
        assert counts["received_bytes"] == pages * page_bytes()
        # the results of tools alone
        assert counts["prefilled_tokens"] == alone.prefilled_tokens - prompts


def page_bytes() -> int:
    leaves = jax.tree.leaves(engine_of(ONE_LAYER, ENGINE).cache_shape().layers)
    return sum(x.size * x.dtype.itemsize for x in leaves) // ENGINE.pages


def asking(workdir: Path, **config) -> Scheduler:
    """A scheduler that asks the prefill process of a workdir."""
    client = PrefillClient(
        workdir, "actor-0", HOST, PrefillConfig(**config), engine_of(ONE_LAYER, ENGINE)
    )
    return Scheduler(client._engine, Letters(), workers=4, worker_deadline_s=30.0, remote=client)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_actor_prefills_by_itself_when_the_prefill_process_does_not(tmp_path, caplog):
    tasks = [task_of(seed) for seed in range(TASKS)]
    played = functools.partial(play, tasks, model=ONE_LAYER)
    alone, _ = played()

    def check(said: str, scheduler: Scheduler, happens=None, asked=range(1, TASKS + 1)):
        caplog.clear()
        if happens is not None:
            happened = iter([happens])
            scheduler.before_dispatch = lambda rows: [action() for action in happened] and None
        groups, stats = played(scheduler=scheduler)
        scheduler.close()
        assert_same(groups, alone)
        assert stats.prompts_by_itself in asked
        assert caplog.text.count(said) == caplog.text.count("prefills by itself") == 1, caplog.text

    check("cannot be read", asking(tmp_path))  # it never was there
    with prefilling(tmp_path, version=2):
        check("cannot load version 1: version 1 is not there", asking(tmp_path))
    with prefilling(tmp_path) as process:
        groups, stats = played(scheduler=asking(tmp_path, deadline_s=60.0))
        assert_same(groups, alone)
        assert stats.prompts_by_itself == 0
        os.kill(process.pid, signal.SIGSTOP)
        check("did not answer within 0.5 s", asking(tmp_path, deadline_s=0.5))
        os.kill(process.pid, signal.SIGCONT)
        scheduler = asking(tmp_path, deadline_s=60.0)
        scheduler.step()
        # killed with requests that it has not answered
        os.kill(process.pid, signal.SIGSTOP)
        ask = scheduler._remote.ask

        def ask_and_kill(*arguments):
            number = ask(*arguments)
            process.kill()
            return number

        scheduler._remote.ask = ask_and_kill
        check("cannot be reached", scheduler)
