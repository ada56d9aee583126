"""Ids that only the server can make, and keys that do not tell whose they are."""

import stat
import subprocess
import sys

import pytest

from people.feedback.identity import AnswerIds, load_secret, user_key

SECRET = bytes(range(32))
USER = user_key(SECRET, "sk-ada")
OTHER = user_key(SECRET, "sk-bob")


def test_an_id_is_known_and_belongs_to_its_user():
    ids = AnswerIds(SECRET)
    id = ids.make(USER, 3, 41)
    assert id.startswith("answer-3-41-")
    assert ids.check(id)
    assert ids.issued_to(id, USER)
    assert not ids.issued_to(id, OTHER)
    # as another process with the same secret sees it
    assert AnswerIds(SECRET).issued_to(id, USER)


def test_ids_of_all_users_versions_and_counters_differ():
    ids = AnswerIds(SECRET)
    made = {
        ids.make(user, version, count)
        for user in (USER, OTHER)
        for version in range(5)
        for count in range(5)
    }
    assert len(made) == 50


def test_no_changed_id_is_known():
    ids = AnswerIds(SECRET)
    id = ids.make(USER, 3, 41)
    for place in range(len(id)):
        for character in "0123456789abcdef-":
            changed = id[:place] + character + id[place + 1 :]
            assert ids.check(changed) == (changed == id)
    for wrong in (
        "",
        "answer",
        id + "0",
        id + "\n",
        " " + id,
        id.upper(),
        id[:-1],
        "\ud800",
        "é" * 40,
    ):
        assert not ids.check(wrong)
        assert not ids.issued_to(wrong, USER)


def test_another_secret_makes_other_ids_and_other_users():
    other = bytes(32)
    assert not AnswerIds(other).check(AnswerIds(SECRET).make(USER, 0, 0))
    assert user_key(other, "sk-ada") != USER
    assert USER != OTHER
    assert "ada" not in USER
    assert len(USER) == 32


def test_what_is_not_a_number_from_zero_on_is_refused():
    with pytest.raises(ValueError, match="version=-1"):
        AnswerIds(SECRET).make(USER, -1, 0)
    with pytest.raises(ValueError, match="counter=-2"):
        AnswerIds(SECRET).make(USER, 0, -2)


def test_a_short_secret_is_refused(tmp_path):
    for make in (AnswerIds, lambda secret: user_key(secret, "key")):
        with pytest.raises(ValueError, match="has 15 bytes; it must have at least 16"):
            make(bytes(15))
    path = tmp_path / "secret"
    path.write_text("abcd")
    with pytest.raises(ValueError, match="has 2 bytes"):
        load_secret(path)
    path.write_text("not hex")
    with pytest.raises(ValueError, match="not a secret in hex digits"):
        load_secret(path)


def test_a_secret_is_made_once_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "state" / "secret"
    program = (
        "import sys\nfrom pathlib import Path\nfrom people.feedback.identity import load_secret\n"
        "print('ready', flush=True)\ninput()\nprint(load_secret(Path(sys.argv[1])).hex())\n"
    )
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for one in racing:
        assert one.stdout.readline() == "ready\n"
    for one in racing:
        one.stdin.write("\n")
        one.stdin.flush()
    made = {bytes.fromhex(one.communicate()[0].strip()) for one in racing}
    assert made == {load_secret(path)}
    assert len(made.pop()) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
