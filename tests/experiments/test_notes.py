"""Notes of idle time: tasks on shared repositories, demonstrations, and what the report counts."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest

from configs import notes as config
from experiments.notes import report, study
from experiments.notes.__main__ import main
from experiments.notes.repositories import NoChange, generate, idle, note, reminded, request
from experiments.notes.source import Requests
from experiments.notes.study import Compared
from experiments.notes.walks import played
from experiments.tab import held_out
from models.families import PRESETS
from models.tokenizer import Tokenizer
from rl_code import sft
from rl_code.config import read_config
from rl_code.environment.episode import Episode
from rl_code.environment.grading import grade_work
from rl_code.environment.notes import with_notes
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.rewards.combine import find_reward
from rl_code.rollout.note_book import notes_after
from rl_code.run.config import RunConfig
from rl_code.train import train
from rl_code.types import Group, Limits
from tests.models.small import narrow_preset

FILES = 7


LIMITS = Limits(turns=10, tokens=4000, turn_tokens=1000, test_runs=0, command_s=5.0)


@pytest.fixture(scope="module")
def built() -> RunConfig:
    return read_config.build(RunConfig, config.get_config("smoke"))


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


def test_tasks_of_a_repository_share_its_files_and_its_scope():
    one = generate("train", 0, 3, FILES)
    tasks = [request(one, number) for number in range(12)]
    assert tasks[5] == request(generate("train", 0, 3, FILES), 5)
    assert len({task.messages[0]["content"] for task in tasks}) > 8
    assert all(task.files == one.files for task in (*tasks, idle(one)))
    assert len({task.meta["repository"] for task in (*tasks, idle(one))}) == 1
    assert generate("train", 0, 4, FILES).files != one.files != generate("test", 0, 3, FILES).files


def test_every_repository_of_every_split_has_tasks():
    for split in ("train", "test"):
        for number in range(6):
            one = generate(split, 1, number, FILES)
            tasks = [request(one, at) for at in range(4)]
            assert len({task.messages[0]["content"] for task in tasks}) > 1


def test_a_note_names_the_lines_of_a_function_the_last_one_first_and_what_it_calls():
    for number in range(5):
        one = generate("train", 0, number, FILES)
        for at, function in enumerate(one.functions):
            told = note(one, at).splitlines()
            if function.calls:
                assert told.pop() == f"then {function.calls[1]}"
            lines = [re.fullmatch(r"(\w+\.py) (\d+) (.+)", x) for x in told]
            assert len(lines) == len(function.steps)
            path, number_, _ = lines[0].groups()
            text = one.files[path].splitlines()
            assert f"def {function.name}(xs):" in text
            assert text[int(number_) - 1].startswith("    return ")


def test_hidden_tests_want_the_change_and_nothing_else(pool):
    one = generate("train", 0, 1, FILES)
    for number in range(4):
        task = request(one, number)
        for files, solved in ((task.files, False), ({**task.files, **task.reference}, True)):
            assert grade_work(task, files, pool, LIMITS).solved == solved
        (path,) = task.reference
        changed = [
            (before, after)
            for before, after in zip(
                task.files[path].splitlines(), task.reference[path].splitlines(), strict=True
            )
            if before != after
        ]
        assert len(changed) == 1


def test_demonstrations_say_what_an_episode_says(built, pool):
    kinds = {}
    for number in itertools.count():
        task = Requests("train").task(number)
        kinds.setdefault(task.meta["kind"], task)
        if len(kinds) == 3:
            break
    texts = ["".join(text for text, _ in task.meta["played"]) for task in kinds.values()]
    prompts = [task.messages[0]["content"] for task in kinds.values()]
    tokenizer = Tokenizer.train(
        [*texts, *prompts], 400, Compact.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>"
    )
    for kind, task in kinds.items():
        episode = episode_of(task, built, tokenizer, pool)
        episode.start()
        texts = [text for text, _ in task.meta["played"]]
        for message, answer in itertools.zip_longest(texts[::2], texts[1::2]):
            ids = tokenizer.encode(message)
            told = episode.step(ids, [0.0] * len(ids), [0] * len(ids))
            assert (told and tokenizer.decode(told)) == answer
        trajectory = episode.finish()
        assert trajectory.status == "submitted" and trajectory.malformed_calls == 0
        assert trajectory.solved or kind == "idle"


def test_a_walk_leaves_the_notes_that_tasks_recall(built, pool):
    one = generate("train", 0, 8, FILES)
    walk = idle(one)
    messages = [text for text, sampled in played(one, walk) if sampled]
    tokenizer = Tokenizer.train(
        ["".join(messages), *one.files.values()], 400, Compact.SPECIAL_TOKENS,
        eos="<|eot|>", pad="<|pad|>",
    )  # fmt: skip
    episode = episode_of(walk, built, tokenizer, pool)
    episode.start()
    for message in messages:
        ids = tokenizer.encode(message)
        episode.step(ids, [0.0] * len(ids), [0] * len(ids))
    group = Group(walk, (episode.finish(),))
    kept = notes_after(group, find_tools(built.tools), {})
    assert kept == {each.name: note(one, at) for at, each in enumerate(one.functions)}
    assert study.right([one], [kept]) == 1.0
    wrong = kept | {one.functions[0].name: "other"}
    assert study.right([one], [wrong]) == pytest.approx(1 - 1 / FILES)
    task = with_notes(reminded(request(one, 0)), kept)
    assert "memory_recall" in task.tools and "memory_store" not in task.tools
    assert "memory_recall" not in request(one, 0).tools
    sampled, read = study.spent(group)
    assert sampled == sum(len(tokenizer.encode(message)) for message in messages) and read > 0


def episode_of(task, built, tokenizer, pool) -> Episode:
    return Episode(
        task,
        group=0,
        index=0,
        protocol=Compact(),
        tools=find_tools(built.tools),
        tokenizer=tokenizer,
        pool=pool,
        limits=LIMITS,
        reward=find_reward(built.reward),
    )


def compared(saved: int, walk: int = 600) -> Compared:
    """Two repositories with four tasks: without notes 200 tokens, with them fewer, half solved."""
    tokens = np.zeros((2, 2, 4, 2), int)
    tokens[0] = (50, 150)
    tokens[1] = (50, 150 - saved)
    solved = np.zeros((2, 2, 4), bool)
    solved[..., ::2] = True
    return Compared(np.array([(walk // 3, walk - walk // 3)] * 2), tokens, solved, 0.5)


def test_the_walk_is_shared_by_the_tasks_of_a_repository():
    one = compared(100)
    assert (
        report.cost(one, variant=0, tasks=4) == 400 and report.cost(one, variant=0, tasks=1) == 200
    )
    assert report.cost(one, variant=1, tasks=4) == (600 + 4 * 100) / 2
    assert report.cost(one, variant=1, tasks=1) == 700
    assert report.break_even(one) == pytest.approx(6)
    assert report.break_even(compared(-10)) == np.inf
    # a repository that is drawn twice counts twice
    assert report.cost(one, np.array([1, 1]), variant=1, tasks=4) == 500


def test_notes_that_lead_to_fewer_solved_tasks_pay_later_or_never():
    one = compared(100)
    solved = one.solved.copy()
    solved[1, :, 2:] = False
    assert report.break_even(dataclasses.replace(one, solved=solved)) == np.inf


def test_the_report_names_both_arms(tmp_path):
    found = [compared(100), compared(120)]
    view = report.costs(found)
    assert list(view.columns[0].cells) == [*study.VARIANTS, "a walk in idle time"]
    assert "notes right in every line: 50.0 %" in report.summary(found)
    assert "5.5 [5.0, 6.0]" in report.summary(found)
    report.draw(found, tmp_path / "notes.png")
    assert (tmp_path / "notes.png").stat().st_size > 10_000


@pytest.mark.parametrize("wrong", [{"split": "some"}, {"idle": 0.9}, {"files": 3}])
def test_wrong_settings_are_named(wrong):
    ((name, _),) = wrong.items()
    with pytest.raises(ValueError, match=name):
        Requests(**{"split": "train", **wrong})


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["notes", str(tmp_path)])
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.long
def test_the_smoke_run_is_compared(built, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "small_reader", narrow_preset())
    train(built, tmp_path)
    with held_out.opened(tmp_path) as run, jax.set_mesh(run.mesh):
        found = study.compare(run, sft.initial_model(run), 2, 2)
    assert found.walks.shape == (2, 2) and found.tokens.shape == (2, 2, 2, 2)
    assert (found.walks > 0).all() and (found.tokens > 0).all()


def test_a_repository_without_a_change_is_passed_over():
    source = Requests("train", seed=2)
    with pytest.raises(NoChange, match="no change of notes/train/2/425 is told"):
        request(generate("train", 2, 425, source.files), 0)
    assert source.task(425) == source.task(425)
    assert source.task(425).meta["repository"] != "notes/train/2/425"
