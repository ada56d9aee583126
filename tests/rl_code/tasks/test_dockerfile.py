"""What a Dockerfile copies, without docker."""

from __future__ import annotations

import os

import pytest

from rl_code.tasks.dockerfile import copied
from rl_code.tasks.source import NoTask
from tests.rl_code.tasks import projects

CONTEXT = {
    "a.txt": "a\n",
    "b.txt": "b\n",
    "run.sh": "#!/bin/sh\n",
    "src/one.py": "1\n",
    "src/deep/two.py": "2\n",
    "src/deep/two.log": "log\n",
    "with space.txt": "s\n",
}
ALL = {f"/app/{path}": text for path, text in CONTEXT.items()}


def read(tmp_path, lines, ignore=None):
    projects.write(tmp_path, CONTEXT)
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").unlink(missing_ok=True)
    os.symlink("a.txt", tmp_path / "link")
    (tmp_path / "Dockerfile").write_text(f"FROM python:3.12 AS base\n{lines}\n")
    if ignore is not None:
        (tmp_path / ".dockerignore").write_text(ignore)
    stage = copied(tmp_path, {"PATH": "/usr/bin"})
    texts = {path: one.content.decode() for path, one in stage.files.items() if one.kind == "file"}
    return stage, texts


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("WORKDIR /app\nCOPY a.txt b.txt ./", {"/app/a.txt": "a\n", "/app/b.txt": "b\n"}),
        ("copy a.txt /app/x", {"/app/x": "a\n"}),
        ("WORKDIR /app\nCOPY a.txt /app", {"/app/a.txt": "a\n"}),
        ("WORKDIR /app\nWORKDIR sub\nCOPY a.txt .", {"/app/sub/a.txt": "a\n"}),
        ('COPY ["with space.txt", "a.txt", "/d/"]', {"/d/with space.txt": "s\n", "/d/a.txt": "a\n"}),
        ("COPY 'with space.txt' /d/s", {"/d/s": "s\n"}),
        ("ADD --chown=me:me --link a.txt /x", {"/x": "a\n"}),
        ("COPY ?.txt /d/", {"/d/a.txt": "a\n", "/d/b.txt": "b\n"}),
        ("COPY [bc].txt /d/", {"/d/b.txt": "b\n"}),
        ("COPY src/*/*.py /d/", {"/d/two.py": "2\n"}),
        ("COPY src/**/*.py /d/", {"/d/one.py": "1\n", "/d/two.py": "2\n"}),
        ("COPY sr* /d/", {"/d/one.py": "1\n", "/d/deep/two.py": "2\n", "/d/deep/two.log": "log\n"}),
        ("COPY src/deep /d", {"/d/two.py": "2\n", "/d/two.log": "log\n"}),
        ("WORKDIR /app\nCOPY . .", ALL),
        ("WORKDIR /app\nCOPY ./ /app/", ALL),
        ("ENV D=/data E=a\nARG F=txt\nCOPY ${E}.$F ${D}/${G:-g}", {"/data/g": "a\n"}),
        ("COPY a.txt \\\n  # a comment\n\n  b.txt \\\n  /d/", {"/d/a.txt": "a\n", "/d/b.txt": "b\n"}),
        ("ENV W=world\nCOPY <<EOF /d/x\nhello $W \\$W\n\n# no comment\nEOF\nCOPY a.txt /d/",
         {"/d/x": "hello world $W\n\n# no comment\n", "/d/a.txt": "a\n"}),
        ("COPY <<'ONE' <<-TWO /d/\n$x\nONE\n\ttwo\n\tTWO", {"/d/ONE": "$x\n", "/d/TWO": "two\n"}),
        ("WORKDIR /x/y\nCOPY b.txt /x", {"/x/b.txt": "b\n"}),
        ("COPY a.txt /old\nFROM x\nCOPY b.txt /new", {"/new": "b\n"}),
        ("COPY a.txt /old\nFROM base\nCOPY b.txt /new", {"/old": "a\n", "/new": "b\n"}),
    ],
)  # fmt: skip
def test_the_forms_of_copy(lines, files, tmp_path):
    assert read(tmp_path, lines)[1] == files


def test_rights_links_folders_and_variables(tmp_path):
    stage, _ = read(
        tmp_path, 'WORKDIR /app\nENV PATH=/app/bin:$PATH\nENV A b c\nCOPY --chmod=0750 a.txt .\n'
        "COPY run.sh link .\nCOPY --chmod=600 run.sh /x\nUSER me\nCMD [\"sh\"]\nEXPOSE 80"
    )  # fmt: skip
    modes = {path: (one.kind, one.mode) for path, one in stage.files.items()}
    assert modes == {
        "/app/a.txt": ("file", 0o750),
        "/app/run.sh": ("file", 0o755),
        "/app/link": ("link", 0o777),
        "/x": ("file", 0o600),
    }
    assert stage.environment == {"PATH": "/app/bin:/usr/bin", "A": "b c"}
    assert (stage.workdir, stage.folders) == ("/app", {"/", "/app"})


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("*.txt", {"run.sh", "src/one.py", "src/deep/two.py", "src/deep/two.log"}),
        ("# all but one\n*\n!src/deep\n**/*.log", {"src/deep/two.py"}),
        ("/src/\n*.sh\n?.txt", {"with space.txt"}),
        ("**/two.*\nsrc/o*", {"a.txt", "b.txt", "run.sh", "with space.txt"}),
    ],
)
def test_dockerignore_leaves_out(ignore, left, tmp_path):
    _, texts = read(tmp_path, "COPY . /d", ignore)
    assert {path.removeprefix("/d/") for path in texts} == left


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("WORKDIR /app\nRUN a && \\\n  b", "line 3: RUN needs an image"),
        ("COPY a.txt \\\n /x\nRUN <<EOF\necho\nEOF", "line 4: RUN needs an image"),
        ("COPY --from=build /x /y", "line 2: COPY with --from=build needs an image of another stage"),
        ("COPY --parents a.txt /x", "line 2: COPY with --parents cannot be followed"),
        ("COPY a.txt 'a", "line 2: COPY a.txt 'a: No closing quotation"),
        ('COPY ["a.txt"]', 'line 2: COPY ["a.txt"] must name what is copied and where to'),
        ("COPY no.txt /x", "line 2: there is no no.txt"),
        ("COPY ../x /x", "line 2: ../x is outside of environment/"),
        ("COPY <<EOF /x\nhello", "line 2: <<EOF has no end"),
        ("ADD https://a/b /x", "line 2: ADD https://a/b is fetched or unpacked"),
        ("ADD x.tar.gz /x", "line 2: ADD x.tar.gz is fetched or unpacked"),
        ("WORKDIR /d/a.txt\nCOPY a.txt b.txt /d/", "line 3: /d/a.txt is a folder already"),
        ("ONBUILD COPY a.txt /x", "line 2: ONBUILD needs an image"),
        ("FRUN x", "line 2: FRUN needs an image"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_named_by_its_line(lines, why, tmp_path):
    with pytest.raises(NoTask) as found:
        read(tmp_path, lines)
    assert str(found.value).startswith(f"environment/Dockerfile, {why}")
