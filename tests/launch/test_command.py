"""Commands without a config explain themselves, and end in one line when their flags are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from absl import app, flags

from launch import __main__ as launch_main
from launch import command, console

ROOT = Path(__file__).resolve().parents[2]


def ending(monkeypatch, *given: str, arguments: bool = False) -> int | str | None:
    """The exit code of a command that is given these words."""
    monkeypatch.setattr(sys, "argv", ["told", *given])
    # absl reads flags once in a process
    monkeypatch.setattr(
        app, "run", lambda main, flags_parser: sys.exit(main(flags_parser(sys.argv)))
    )
    monkeypatch.setattr(flags, "FLAGS", known := flags.FlagValues())
    flags.DEFINE_string("workdir", None, "A folder.", flag_values=known)
    flags.DEFINE_float("share", 0.0, "A number.", 0.0, flag_values=known)

    def main(argv: list[str]) -> None:
        print("called with", argv[1:])

    with pytest.raises(SystemExit) as ended:
        command.run(main, arguments=arguments)
    return ended.value.code


@pytest.mark.parametrize(
    ("given", "arguments", "words"),
    [
        (["--wrokdir=x"], False, "Unknown command line flag 'wrokdir'. Did you mean: workdir;"),
        (["--workdir"], False, "Missing value for flag --workdir; --help"),
        (["runs/a"], False, "'runs/a' is not a flag; flags look like --workdir=runs/first"),
        (["--share=nan"], False, "flag --share=nan: it must be a finite number"),
        (["--share=inf"], False, "flag --share=inf: it must be a finite number"),
        (["runs/a", "--flag"], True, "Unknown command line flag 'flag'"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(monkeypatch, capsys, given, arguments, words):
    assert ending(monkeypatch, *given, arguments=arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(words) and told.err.count("\n") == 1


def test_words_reach_a_command_that_takes_them(monkeypatch, capsys):
    assert ending(monkeypatch, "runs/a", "--workdir=w", "runs/b", arguments=True) is None
    assert capsys.readouterr().out == "called with ['runs/a', 'runs/b']\n"


def test_help_is_no_error(monkeypatch, capsys):
    assert ending(monkeypatch, "--help") == 0
    assert "called" not in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.py")), ids=lambda path: path.stem)
def test_every_command_reads_its_flags_in_one_of_two_ways(path):
    text = path.read_text()
    if "__name__ ==" in text and path.name != "__main__.py":
        assert text.count("    flags.run(") + text.count("    command.run(") == 1
    assert "app.run(" not in text or path.name in ("flags.py", "command.py")


def test_a_config_of_the_project_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = str(ROOT / "configs" / "quickstart.py")
    assert command.config_file("configs/quickstart.py:smoke") == f"{own}:smoke"
    assert command.config_file("configs/none.py") == "configs/none.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").write_text("")
    assert command.config_file("configs/quickstart.py") == "configs/quickstart.py"


def test_the_console_command_runs_the_modules_that_are_commands(monkeypatch, capsys):
    listed = {line.rpartition("launch.")[2] for line, _ in launch_main.commands()}
    assert set(console.commands()) == {name for name in listed if name.isidentifier()}
    ran = []
    run_module = lambda module, **settings: ran.append((module, sys.argv[1:]))  # noqa: E731
    monkeypatch.setattr(console.runpy, "run_module", run_module)
    monkeypatch.setattr(console, "begin", lambda words: ran.append(words))
    for words in (["train", "--config=c.py"], [], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["rl-code", *words])
        console.main()
    assert ran == [
        ["-m", "launch.train", "--config=c.py"],
        ("launch.train", ["--config=c.py"]),
        ("launch", []),
        ("launch", ["--help"]),
    ]
    monkeypatch.setattr(sys, "argv", ["rl-code", "trian"])
    with pytest.raises(SystemExit) as ended:
        console.main()
    assert ended.value.code == 2 and "Did you mean 'train'?" in capsys.readouterr().err
