"""Tasks from Harbor's folders: their world, their reference, and both of their graders."""

from __future__ import annotations

import dataclasses

import pytest

from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.grading import grade_in_words, grade_work
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import File
from rl_code.store.serialization import dumps, loads
from rl_code.tasks import validate
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.types import Limits, Tests
from tests.rl_code.environment.scripted import begin, say
from tests.rl_code.signals import rewarder
from tests.rl_code.tasks.harbor_folders import DOUBLE, SUM, TEST_SH, write

LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=120.0)


def source(path, packages, **settings):
    settings = {"path": str(path), "places": {"packages": packages}, **settings}
    return find_source(Named("harbor", settings), "tasks")


@pytest.mark.long
def test_a_folder_becomes_a_task_that_works(layered_pool, packages, tmp_path):
    write(tmp_path / "sum", SUM)
    (task,) = source(tmp_path / "sum", packages).load(layered_pool, tmp_path)
    assert task.messages[0]["content"] == (
        "Write the sum of /data/numbers.txt into total.txt, and remove old.txt."
    )
    assert task.files == {"old.txt": "old\n"} and task.world.workspace == "/app"
    assert task.reference == {"total.txt": "3\n"} and task.meta["deleted"] == ("old.txt",)
    assert task.meta["agent_s"] == 30.0 and task.hidden_tests.script.timeout_s == 60.0
    tests = "harbor_tests/test_outputs.py"
    suite = task.hidden_tests.suite
    assert suite.fail_to_pass == (f"{tests}::test_total", f"{tests}::test_old")
    assert suite.pass_to_pass == (f"{tests}::test_data",)
    verdict = validate.judge(task, layered_pool, LIMITS, 1)
    assert (verdict.reason, verdict.detail) == ("", "")
    assert verdict.forgeable == "its tests read old.txt, which the work may change"
    assert (verdict.required, verdict.guarded) == (3, 2)
    with pytest.raises(TaskFileError, match=r"none of its folders has task\.toml"):
        source(tmp_path / "sum" / "tests", packages).load(layered_pool, None)
    with pytest.raises(ValueError, match="is not one of both, script, suite"):
        source(tmp_path, packages, grader="test.sh")


@pytest.fixture(scope="module")
def doubled(layered_pool, packages, tmp_path_factory):
    """The task of code, which test.sh alone grades; its workspace has a folder of programs."""
    folder = write(
        tmp_path_factory.mktemp("tasks") / "double",
        DOUBLE,
        environment__Dockerfile=DOUBLE["environment/Dockerfile"] + 'ENV PATH="/app/bin:$PATH"\n',
    )
    (task,) = source(folder, packages, grader="script").load(layered_pool, None)
    return task


RIGHT = "def double(x):\n    return x + x\n"
WRONG = "def double(x):\n    return x\n"
ALL_WELL = "echo 1 > /logs/verifier/reward.txt"
FORGERS = {
    "writes the reward and ends": f"import os\nos.system({ALL_WELL!r})\nos._exit(0)\n",
    "ends well": "import os\nos._exit(0)\n",
    "leaves a process behind": """import os, time
if not os.fork():
    os.setsid()
    while True:
        # in one step: whenever it is killed, a whole file stands there
        open('/logs/verifier/next', 'w').write('{"reward": 1}')
        os.replace('/logs/verifier/next', '/logs/verifier/reward.json')
        time.sleep(0.01)
while not os.path.exists('/logs/verifier/reward.json'):
    time.sleep(0.01)
""",
    "writes test.sh anew": "import pathlib\nat = pathlib.Path('/tests/test.sh')\n"
    "at.write_text(at.read_text().replace('echo 0', 'echo 1'))\n",
    "ends test.sh": f"import os, signal\nos.system({ALL_WELL!r})\n"
    "os.kill(os.getppid(), signal.SIGKILL)\n",
    "reads what is expected": """import re
def double(x):
    text = open('/tests/test_outputs.py').read()
    return int(re.search(r'double[(]%s[)] == (-?[0-9]+)' % x, text)[1])
""",
    "equals everything": "class Yes:\n    __eq__ = lambda s, o: True\n"
    "def double(x):\n    return Yes()\n",
    "no test fails": "import _pytest.python\n_pytest.python.Function.runtest = lambda s: None\n"
    "double = len\n",
}


QUICK = ("writes the reward and ends",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.long, id=name)
        for name in FORGERS
    ],
)
def test_a_forged_reward_is_proven_and_paid_nothing(name, doubled, layered_pool):
    work = {"double.py": FORGERS[name]}
    grade, (error,) = grade_in_words(doubled, work, layered_pool, LIMITS)
    assert grade.scores == {"reward": 0.0} and not grade.solved and grade.cheated
    assert "canary_passed" in grade.flags and error.startswith("its reward is the same where")


SHADOWS = {
    path: f"#!/bin/sh\n{ALL_WELL}\nkill -9 $PPID\n"
    for path in ("bin/python", "bin/bash", "bin/env")
} | {
    "pytest.py": "",
    "pytest/__init__.py": "",
    "conftest.py": "import os\nos._exit(0)\n",
    "sitecustomize.py": "import os\nos._exit(0)\n",
    "pathlib.py": "import os\nos._exit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "site-packages/pytest.py": "",
}


def test_nothing_of_the_work_stands_in_for_what_grades_it(doubled, layered_pool):
    for content in (WRONG, RIGHT):
        work = {path: File(text.encode(), 0o755) for path, text in SHADOWS.items()}
        work |= {
            "double.py": content,
            "report.txt": File(b"/logs/verifier/reward.txt", kind="link"),
        }
        grade, errors = grade_in_words(doubled, work, layered_pool, LIMITS)
        assert grade.scores == {"reward": float(content == RIGHT)}, errors
        assert not grade.flags and grade.solved == (content == RIGHT)


def test_what_an_episode_leaves_outside_of_its_workspace_is_not_graded(doubled, layered_pool):
    script = """set -e
mkdir -p /logs/verifier /tests /solution /usr/local/bin
echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json
printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod +x /tests/test.sh
cp /tests/test.sh /usr/local/bin/python
mkdir -p /app/tests; ln -s /logs /app/logs; ln -s / /app/root; ln -s ../logs/verifier /app/verifier
(setsid sh -c 'while true; do echo 1 > /logs/verifier/reward.txt; done' &) > /dev/null 2>&1
"""
    with layered_pool.open(doubled.files, doubled.world) as sandbox:
        done = sandbox.run(["bash", "-c", script], timeout_s=30)
        assert done.exit_code == 0, done
        work = sandbox.snapshot()
    assert work.keys() == {"double.py", "logs", "root", "tests", "verifier"}
    grade = grade_work(doubled, work, layered_pool, LIMITS)
    assert grade.scores == {"reward": 0.0} and not grade.flags


def test_rewards_are_those_of_the_file(doubled, layered_pool):
    def graded(text, **settings):
        script = dataclasses.replace(
            doubled.hidden_tests.script, files={"test.sh": text.encode()}, **settings
        )
        task = dataclasses.replace(doubled, hidden_tests=Tests(script=script))
        grade, (error,) = grade_in_words(task, doubled.files, layered_pool, LIMITS)
        return grade.scores, grade.solved, error

    at = "/logs/verifier"
    half = graded(f"echo 0.5 > {at}/reward.txt\necho some words\nexit 3\n")
    assert half == ({"reward": 0.5}, False, "its reward is 0.5: some words")
    both = f"""echo 1 > {at}/reward.txt; echo '{{"reward": 2, "style": 0.25}}' > {at}/reward.json"""
    assert graded(both) == ({"reward": 2.0, "style": 0.25}, True, "")
    # the mean of all, where none has the name
    named = f"""echo '{{"a": 1, "b": 0.5}}' > {at}/reward.json"""
    assert graded(named)[0] == {"reward": 0.75, "a": 1.0, "b": 0.5}
    python = "#!/usr/bin/env python3\nimport os\n"
    python += f"open('{at}/reward.txt', 'w').write(os.environ['PAYS'])\n"
    assert graded(python, environment={"PAYS": "1"})[1]
    for text, why in (
        ("uvx x", f"it wrote neither {at}/reward.json nor reward.txt; it ended with 127: "),
        (f"echo nan > {at}/reward.txt", "reward.txt holds 'nan\\n' instead of a finite number"),
        (f"touch {at}/reward.txt", "reward.txt is empty"),
        (f"echo '[1]' > {at}/reward.json", "reward.json must be an object"),
        (f"""echo '{{"a": "1"}}' > {at}/reward.json""", "reward.json holds '1' as 'a', no finite"),
        (f"mkdir {at}/reward.json", f"{at}/reward.json cannot be read"),
        (f"mkfifo {at}/reward.txt", f"{at}/reward.txt cannot be read"),
        (f"ln -s /usr/bin/env {at}/reward.txt", f"{at}/reward.txt cannot be read"),
        (f"yes 1 | head -c 300000 > {at}/reward.txt", "reward.txt holds '1"),
        (f"printf '\\377' > {at}/reward.txt", f"{at}/reward.txt cannot be read"),
        (f"head -c 9000 /dev/zero | tr '\\0' '[' > {at}/reward.json", "reward.json is no JSON"),
    ):
        scores, solved, error = graded(text)
        assert scores == {"reward": 0.0} and not solved and why in error, (text, error)
    late = graded(f"echo 1 > {at}/reward.txt; sleep 60", timeout_s=0.5)
    assert late[:2] == ({"reward": 0.0}, False) and "it took more than 0.5 s" in late[2]


def test_an_episode_is_paid_what_the_file_says(doubled, layered_pool):
    tokenizer = Tokenizer.train(["def f(x)"] * 4, 300, Compact.SPECIAL_TOKENS)
    script = dataclasses.replace(
        doubled.hidden_tests.script,
        files={"test.sh": b"echo 0.25 > /logs/verifier/reward.txt\n"},
    )
    task = dataclasses.replace(doubled, hidden_tests=Tests(script=script))
    task = dataclasses.replace(task, meta={**task.meta, "agent_s": 7.0})
    limits = dataclasses.replace(LIMITS, turns=2, tokens=400, turn_tokens=50)
    reward = rewarder("tests", dict(name="score", weight=2.0))
    episode = begin(task, layered_pool, tokenizer, limits, reward=reward)
    assert episode.limits.tools_s == 7.0
    say(episode, tokenizer, "<|call|>submit<|end|><|eot|>")
    done = episode.finish()
    assert (done.status, done.solved, done.scores) == ("submitted", False, {"reward": 0.25})
    assert done.reward.components == {"tests": 0.0, "score": 0.5}
    assert loads(dumps(task)) == task


@pytest.mark.long
def test_validation_says_where_the_two_graders_differ(layered_pool, packages, tmp_path):
    early = "mkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"
    never = "uvx pytest /tests/test_outputs.py\n"
    for name, text in {"both": TEST_SH, "early": early, "never": never}.items():
        write(tmp_path / name, DOUBLE, **{"tests/test.sh": text})
    found = dict(source(tmp_path, packages).load_each(layered_pool, tmp_path))
    verdicts = {
        id.removeprefix("harbor/"): validate.judge(task, layered_pool, LIMITS, 1)
        for id, task in found.items()
    }
    assert verdicts["both"].reason == "" and verdicts["both"].forgeable == ""
    assert (verdicts["both"].required, verdicts["both"].guarded) == (4, 4)
    assert verdicts["early"].reason == verdicts["never"].reason == "its two graders differ"
    assert verdicts["early"].detail.startswith("before the work test.sh pays, and the suite fails")
    assert verdicts["never"].detail.startswith(
        "with its reference the suite passes, and test.sh fails: test.sh: it wrote neither"
    )
    assert "uvx: command not found" in verdicts["never"].detail
    # test.sh alone, where nothing in it can be changed, pays whoever writes the file
    write(tmp_path / "shell", DOUBLE, **{"tests/test_outputs.py": None, "tests/test.sh": SHELL})
    (task,) = source(tmp_path / "shell", packages).load(layered_pool, tmp_path)
    assert task.hidden_tests.suite is None
    alone = validate.judge(task, layered_pool, LIMITS, 1)
    assert (alone.reason, alone.forgeable) == ("", "no canary and no value for test.sh")


SHELL = """if python -c 'import double; assert double.double(4) == 8'
then echo 1 > /logs/verifier/reward.txt
fi
"""
