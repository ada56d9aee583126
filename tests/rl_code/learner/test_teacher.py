"""A teacher's contexts: packed beside the batch in any way, they say the same as each one alone, and
no token of them is trained on.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from models.lora import LoRA, trained
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from rl_code.config.named import Named
from rl_code.learner.advantages import GRPO
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.config import LearnerConfig
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.feedback import Feedback
from rl_code.learner.learner import Learner
from rl_code.learner.objective import LossConfig
from rl_code.learner.teacher import Teacher, first_state, with_average
from tests.rl_code.learner import test_documents
from tests.rl_code.learner.conftest import VOCAB, make_toy
from tests.rl_code.learner.steps import OPTIMIZER, assert_close, assert_left_alone, fresh
from tests.rl_code.learner.test_trees import SIZES, as_tree

pytestmark = pytest.mark.usefixtures("shared_programs")
TEMPERATURE = 0.8
SLOW = dataclasses.replace(OPTIMIZER, learning_rate=1e-3, weight_decay=0.0)
PACK = PackConfig(rows=4, slots=240, targets=120, max_staleness=0, drop_uninformative=False)
# more parts than one for the contexts of a step
NARROW = dataclasses.replace(PACK, rows=2, slots=480)


@dataclasses.dataclass(frozen=True)
class Numbered(Feedback):
    """The index of the trajectory, but for the second of a group, which gets nothing."""

    def __call__(self, group, trajectory):
        return "" if trajectory.index == 1 else f"{group.task.id} {trajectory.index}"


FEEDBACK = Named(f"{__name__}:Numbered")


def prompt_with(task, text):
    """Another prompt for each text, some of them shorter than the policy's, with a common start."""
    rng = np.random.default_rng(sum(map(ord, text)))
    return [7, 8, *rng.integers(0, VOCAB, rng.integers(0, 12)).tolist()]


def config_of(pack=PACK, micro_batches=1, epochs=1, **teacher):
    teacher = dict(divergence=Named("top_k", {"k": 5}), slots=300) | teacher
    return LearnerConfig(
        optimizer=SLOW,
        epochs=epochs,
        loss=LossConfig(correction="none", temperature=TEMPERATURE),
        pack=pack,
        micro_batches=micro_batches,
        teacher=TeacherConfig(**teacher),
    )


# An average teaches, and nothing else does.
AVERAGED = config_of(average=0.75, feedback=FEEDBACK, rewards=0.0, divergence=Named("full"))


@pytest.fixture(scope="module")
def trees(build):
    rng = np.random.default_rng(5)
    brief = rng.integers(0, VOCAB, 5)
    return [
        build.group([as_tree(rng, t, brief) for t in group.trajectories], number)
        for number, group in enumerate(build.groups(SIZES, seed=3))
    ]


def advantages_of(groups):
    rng = np.random.default_rng(2)
    return [list(rng.standard_normal(len(group.trajectories))) for group in groups]


def here():
    return SingleDeviceSharding(jax.devices()[0])


def said(config, groups, model, teacher=None, rows=None):
    """What the teacher says of a step, and the policy's batch."""
    batch, _ = pack(groups, advantages_of(groups), config.pack, version=0)
    state = first_state(config, fresh(model))
    one = Teacher(config, rows or here(), teacher, prompt_with)
    taught, _ = one(state, groups, advantages_of(groups), batch, 0)
    return jax.device_get(taught), batch


def alone(model, t, prompt):
    """Log-probabilities of all tokens at each target of a trajectory, each context by itself."""
    table, mix, norm = (np.asarray(x, np.float64) for x in (model.table, model.mix, model.norm))
    found = []
    for index, context in enumerate(t.contexts):
        tokens = t.whole(index)
        places = context.kept + np.flatnonzero(context.sampled)
        own = t.contexts[0].tokens[: t.prompt_length]
        if prompt is not None and np.array_equal(tokens[: t.prompt_length], own):
            tokens = np.concatenate([prompt, tokens[t.prompt_length :]])
            places = places + len(prompt) - t.prompt_length
        # a model that sees all earlier tokens of its row
        x = table[tokens] * np.sin(np.arange(len(tokens))[:, None] + np.arange(1.0, 9.0))
        seen = np.cumsum(x, axis=0) / np.arange(1, len(tokens) + 1)[:, None]
        hidden = norm * np.tanh((x + seen) @ mix)
        found.append(log_softmax(hidden[places - 1] @ table.T / TEMPERATURE))
    return np.concatenate(found)


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def another(model):
    """A model with other parameters."""
    moved = jax.tree.map(lambda x: (1.1 * np.asarray(x) + 0.1).astype(x.dtype), model)
    return jax.device_put(moved, jax.devices()[0])


def expected(config, groups, model, batch):
    """(mask, log-probabilities of all tokens) at every target of a batch."""
    mask = np.zeros(batch.mask.shape)
    logp = np.zeros((*batch.mask.shape, VOCAB))
    members = [(group, t) for group in groups for t in group.trajectories]
    for number, (group, t) in enumerate(members):
        prompt = None
        if config.teacher.feedback is not None:
            text = Numbered()(group, t)
            if not text:
                continue
            prompt = prompt_with(group.task, text)
        at = (batch.mask > 0) & (batch.trajectories == number)
        mask[at] = 1.0
        logp[at] = alone(model, t, prompt)
    return mask, logp


@pytest.mark.long
@pytest.mark.parametrize(
    ("shapes", "micro_batches", "feedback"),
    [(PACK, 1, None), (PACK, 4, FEEDBACK), (NARROW, 2, FEEDBACK), (NARROW, 2, None)],
    ids=["one", "four with feedback", "few rows with feedback", "few rows"],
)
def test_packed_contexts_say_what_each_says_alone(build, trees, shapes, micro_batches, feedback):
    model = make_toy()
    config = config_of(
        shapes, micro_batches, feedback=feedback, weights="x" if not feedback else ""
    )
    taught, batch = said(config, trees, model, None if feedback else model)
    mask, logp = expected(config, trees, model, batch)
    np.testing.assert_array_equal(taught.mask, mask)
    assert (mask.sum() < batch.mask.sum()) == (feedback is not None)
    chosen = np.take_along_axis(logp, batch.targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(taught.logprobs, chosen, atol=1e-5)
    top = -np.sort(-logp, axis=-1)[..., :5]
    np.testing.assert_allclose(taught.top, top * (mask[..., None] > 0), atol=1e-5)


def test_the_whole_distribution_follows_from_the_hidden_states(build, trees):
    model = make_toy()
    config = config_of(feedback=FEEDBACK, divergence=Named("full"))
    taught, batch = said(config, trees, model)
    mask, logp = expected(config, trees, model, batch)
    found = log_softmax(taught.hidden @ np.asarray(model.table).T / TEMPERATURE)
    np.testing.assert_allclose(found[mask > 0], logp[mask > 0], atol=1e-5)


def test_contexts_of_small_rows_come_in_parts(build, trees):
    config = config_of(dataclasses.replace(NARROW, rows=2), 2, feedback=FEEDBACK, slots=80)
    batch, _ = pack(trees, advantages_of(trees), config.pack, version=0)
    teacher = Teacher(config, here(), None, prompt_with)
    parts = teacher.rows(trees, advantages_of(trees), batch, 0)
    assert len(parts) > 1
    places = np.concatenate([part.places.reshape(-1) for part in parts])
    real = places[places < batch.mask.size]
    assert len(set(real)) == len(real)  # each target once
    wide = said(config_of(NARROW, 2, feedback=FEEDBACK), trees, make_toy())[0]
    assert_close(said(config, trees, make_toy())[0], wide)


@pytest.mark.parametrize("documents", [False, True])
def test_without_feedback_the_rows_are_those_of_the_policy(build, trees, documents):
    shapes, groups = PACK, trees
    if documents:
        shapes, groups = test_documents.PACK, test_documents.make_groups(build, (3, 2, 4))
    shapes = dataclasses.replace(shapes, drop_uninformative=False)
    config = config_of(shapes, weights="x", slots=shapes.slots)
    advantages = advantages_of(groups)
    batch, _ = pack(groups, advantages, shapes, version=0)
    (part,) = Teacher(config, here(), make_toy()).rows(groups, advantages, batch, 0)
    for name in ("tokens", "positions", "segments", "branches", "targets", "sources", "documents"):
        np.testing.assert_array_equal(getattr(part.batch, name), getattr(batch, name))
    real = batch.mask.reshape(-1) > 0
    np.testing.assert_array_equal(part.places.reshape(-1)[real], np.flatnonzero(real))
    assert (part.places.reshape(-1)[~real] == batch.mask.size).all()


def test_the_number_of_devices_changes_nothing(build, trees):
    config = config_of(feedback=FEEDBACK, divergence=Named("full"))
    one, _ = said(config, trees, make_toy())
    mesh = make_mesh(MeshConfig(2, 1))
    with jax.set_mesh(mesh):
        model = jax.device_put(fresh(make_toy()), NamedSharding(mesh, PartitionSpec()))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        other, _ = said(config, trees, model, rows=rows)
    assert_close(other, one)


def step(config, groups, model, teacher=None):
    """(gradient, metrics, state) of one step of the learner."""
    learn = Learner(config, here(), model, teacher, prompt_with)
    state, metrics = learn(first_state(config, fresh(model)), groups, 0)
    return optax.tree.get(state.opt_state, "mu"), metrics, state


def test_a_lesson_moves_the_policy_towards_its_teacher(build):
    groups = build.groups([3, 4], seed=1)
    model, teacher = make_toy(), another(make_toy())
    config = config_of(weights="x", rewards=0.0, divergence=Named("full"))
    learn = Learner(config, here(), model, teacher)
    state = first_state(config, fresh(model))
    found = []
    for _ in range(4):
        state, metrics = learn(state, groups, 0)
        found.append(float(metrics["teacher/divergence"]))
    assert found == sorted(found, reverse=True) and found[-1] < 0.95 * found[0]
    assert float(metrics["teacher/share"]) == 1.0
    assert float(metrics["train/credited"]) == 1.0  # by the teacher: rewards count for nothing


@pytest.mark.parametrize("form", ["full", "top_k", "sampled"])
@pytest.mark.quick(first=1)
def test_a_teacher_equal_to_the_policy_has_nothing_to_say(build, form):
    groups = build.groups([3, 4], seed=1)
    config = config_of(weights="x", rewards=0.0, divergence=Named(form))
    gradient, metrics, _ = step(config, groups, make_toy(), make_toy())
    assert abs(float(metrics["teacher/divergence"])) < 1e-6
    assert abs(float(metrics["train/loss"])) < 1e-6
    assert max(np.abs(x).max() for x in jax.tree.leaves(jax.device_get(gradient))) < 1e-5


def test_the_sampled_form_is_an_advantage(build):
    """The same step as with advantages from which the divergence was taken by hand."""
    groups = build.groups([3, 4], seed=1)
    model, teacher = make_toy(), another(make_toy())
    config = config_of(weights="x", divergence=Named("sampled"), coef=0.3, rewards=2.0)
    gradient, _, _ = step(config, groups, model, teacher)

    def by_hand(group):
        values = GRPO()(group)
        out = []
        for t, value in zip(group.trajectories, values, strict=True):
            there, here = (
                np.take_along_axis(
                    alone(one, t, None), t.tokens[t.sampled][:, None].astype(int), -1
                )[:, 0]
                for one in (teacher, model)
            )
            out.append((2.0 * value - 0.3 * (here - there)).astype(np.float32))
        return out

    plain = dataclasses.replace(config, teacher=None)
    learn = Learner(plain, here(), model)
    learn._advantage = by_hand
    state, metrics = learn(first_state(plain, fresh(model)), groups, 0)
    each = np.concatenate([np.concatenate(by_hand(group)) for group in groups])
    assert metrics["train/credited"] == np.mean(each != 0) == 1.0
    assert_close(gradient, optax.tree.get(state.opt_state, "mu"), rtol=1e-4)


def test_trajectories_without_feedback_change_nothing(build):
    """Where nobody has feedback the update leaves every bit of the state alone."""
    groups = [build.group([t for t in build.groups([3], seed=1)[0].trajectories if t.index == 1])]
    learn = Learner(AVERAGED, here(), make_toy(), None, prompt_with)
    assert_left_alone(learn, first_state(AVERAGED, fresh(make_toy())), groups, 0)


@pytest.mark.parametrize("form", ["full", "sampled"])
@pytest.mark.quick(first=0)
def test_two_phases_take_the_step_of_one(build, form):
    groups = build.turns([3, 2, 4, 1], seed=2)
    model = make_toy()
    one = PackConfig(rows=4, slots=240, targets=120, drop_uninformative=False, runs=12)
    two = dataclasses.replace(one, prompt_slots=80)
    feedback = dict(feedback=FEEDBACK, divergence=Named(form), slots=320)
    expected = step(config_of(one, **feedback), groups, model)
    found = step(config_of(two, **feedback), groups, model)
    assert_close(found[0], expected[0], rtol=1e-4)
    assert float(found[1]["teacher/divergence"]) == pytest.approx(
        float(expected[1]["teacher/divergence"]), rel=1e-4
    )


def test_a_teacher_without_weight_is_asked_for_metrics_alone(build):
    groups = build.groups([3, 4], seed=1)
    config = config_of(feedback=FEEDBACK, coef=0.0, divergence=Named("full"))
    gradient, metrics, _ = step(config, groups, make_toy())
    assert float(metrics["teacher/divergence"]) > 0.0
    expected, plain, _ = step(dataclasses.replace(config, teacher=None), groups, make_toy())
    assert_close(gradient, expected)
    # tokens of trajectories that earned what their group earned on average have no advantage
    each = [(t, GRPO()(group)[i]) for group in groups for i, t in enumerate(group.trajectories)]
    counts = [(int(t.sampled.sum()), value != 0.0) for t, value in each]
    share = sum(count * credited for count, credited in counts) / sum(count for count, _ in counts)
    assert metrics["train/credited"] == plain["train/credited"] == pytest.approx(share)


def test_the_average_follows_the_weights(build):
    groups = build.groups([3, 4], seed=1)
    model = make_toy()
    learn = Learner(AVERAGED, here(), model, None, prompt_with)
    state = first_state(AVERAGED, fresh(model))
    expected = np.asarray(model.table)
    for version in range(2):
        state, _ = learn(state, [_at(group, version) for group in groups], version)
        expected = 0.75 * expected + 0.25 * np.asarray(state.model.table)
    np.testing.assert_allclose(state.average.table, expected, rtol=1e-6)
    assert not np.array_equal(state.average.table, state.model.table)
    # the same bits where the weights stay
    still, _ = learn(state, [], 2)
    assert np.asarray(still.step) == 2


def _at(group, version):
    """The group as if this version had sampled it."""
    members = []
    for t in group.trajectories:
        contexts = [
            dataclasses.replace(c, versions=np.where(c.sampled, version, -1).astype(np.int32))
            for c in t.contexts
        ]
        members.append(dataclasses.replace(t, contexts=tuple(contexts)))
    return dataclasses.replace(group, trajectories=tuple(members))


def test_a_state_gets_an_average_or_loses_it():
    config = config_of(average=0.5)
    without = dataclasses.replace(config, teacher=None)
    state = first_state(without, fresh(make_toy()))
    assert state.average is None
    begun = with_average(config, state)
    np.testing.assert_array_equal(begun.average.table, state.model.table)
    assert with_average(config, begun) is begun
    assert with_average(without, begun).average is None


def singles(groups):
    """Each trajectory as a group of its own."""
    return [
        dataclasses.replace(group, trajectories=(t,))
        for group in groups
        for t in group.trajectories
    ]


def by_trajectory(taught, batch):
    """Number of the trajectory -> the teacher's log-probabilities of its targets."""
    numbers = sorted(set(batch.trajectories[batch.mask > 0].tolist()))
    return {
        number: taught.logprobs[(batch.mask > 0) & (batch.trajectories == number)]
        for number in numbers
    }


@pytest.mark.long
def test_layers_that_choose_blocks_say_the_same_of_packed_contexts(build, trees):
    """Contexts whose prompts are repeated, in rows of two levels; others are a toy's above."""
    model = build.attending("nsa")
    shapes = dataclasses.replace(PACK, rows=8, slots=480, runs=60)
    config = config_of(shapes, 2, feedback=FEEDBACK, slots=640)
    packed = by_trajectory(*said(config, trees, model))
    apart = by_trajectory(*said(config, singles(trees), model))
    assert packed.keys() == apart.keys()
    for number, found in packed.items():
        np.testing.assert_allclose(found, apart[number], atol=2e-5)


@pytest.mark.long
def test_a_mesh_of_all_axes_says_the_same(build, trees):
    mesh = MeshConfig(fsdp=2, context=2, tensor=2)
    config = config_of(
        dataclasses.replace(PACK, slots=480, parts=mesh.context),
        2,
        feedback=FEEDBACK,
        divergence=Named("full"),
        slots=640,
    )
    model = build.model(num_heads=4, num_kv_heads=2)
    one, batch = said(config, trees, model)
    devices = make_mesh(mesh)
    copied = fresh(model)
    with jax.set_mesh(devices):
        placed = jax.device_put(copied, parameter_shardings(model, devices))
        rows = NamedSharding(devices, partition_spec(("batch",)))
        other, _ = said(config, trees, placed, rows=rows)
    real = batch.mask > 0
    np.testing.assert_allclose(other.logprobs[real], one.logprobs[real], atol=2e-5)
    np.testing.assert_allclose(other.hidden[real], one.hidden[real], atol=1e-4)


@pytest.mark.long
def test_adapters_have_an_average_of_their_own(build):
    """The average of a model with adapters is that of the adapters, and teaches with the base."""
    groups = build.groups([3, 4], seed=1)
    model = build.model(lora=LoRA(rank=2, alpha=4.0, targets=("q_proj", "up_proj")))
    config = config_of(average=0.5, feedback=FEEDBACK, divergence=Named("full"))
    learn = Learner(config, here(), model, None, prompt_with)
    state = first_state(config, fresh(model))
    assert sum(x.size for x in jax.tree.leaves(state.average)) == sum(
        x.size for x in jax.tree.leaves(trained(model))
    )
    for version in range(2):
        before = jax.device_get(state.average)
        state, metrics = learn(state, [_at(group, version) for group in groups], version)
        half = jax.tree.map(lambda a, b: 0.5 * (a + b), before, trained(state.model))
        assert_close(state.average, half)
    assert np.isfinite(metrics["teacher/divergence"])


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.quick(first=0)
def test_later_epochs_have_the_teacher_of_the_first(build, average):
    """The weights of the step teach in all its epochs, though updates donate them."""
    groups = build.groups([3, 4], seed=1)
    config = config_of(average=average, feedback=FEEDBACK, divergence=Named("full"), epochs=3)
    _, metrics, _ = step(config, groups, make_toy())
    assert np.isfinite(metrics["train/loss"]) and metrics["train/finite"]


def test_a_teacher_and_its_weights_must_agree():
    with pytest.raises(ValueError, match="disagree"):
        Teacher(config_of(weights="x"), here())
    with pytest.raises(ValueError, match="needs a function"):
        Teacher(config_of(feedback=FEEDBACK), here())
