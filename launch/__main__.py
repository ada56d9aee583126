"""Lists the commands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import rich.box
import rich.console
import rich.table

from rl_code.text.lines import split_lines

ROOT = Path(__file__).resolve().parents[1]
# Where commands are: python -m <folder>.<name>.
FOLDERS = ("launch", "experiments")
_GUARD = "if __name__ == '__main__'"


def commands() -> Iterator[tuple[str, str]]:
    """(command, what it does in one line) of every module that runs as a program, and every script.

    Nothing is imported: what a module does is the first sentence of its docstring.
    """
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__).resolve():
                continue
            tree = ast.parse(path.read_text())
            guarded = any(ast.unparse(node).startswith(_GUARD) for node in tree.body)
            if guarded or path.name == "__main__.py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(part for part in parts if part != "__main__")
                yield f"python -m {name}", first_sentence(ast.get_docstring(tree) or "")
    for path in sorted((ROOT / "launch").glob("*.sh")):
        lines = split_lines(path.read_text())
        words = [line.lstrip("# ") for line in lines[:3] if line.startswith("# ")]
        # a script that sets up the shell itself says so in its first line
        program = "source" if lines[0].startswith("# Sourced") else "bash"
        yield f"{program} launch/{path.name}", first_sentence(" ".join(words))


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."


def main() -> None:
    """Prints the commands as a table."""
    table = rich.table.Table(box=rich.box.SIMPLE)
    table.add_column("command", no_wrap=True)
    table.add_column("what it does")
    for command, words in commands():
        table.add_row(command, words)
    console = rich.console.Console(width=132)
    console.print(table)
    console.print("Each takes --help. Most need --config=<file> and --workdir=<folder>.")


if __name__ == "__main__":
    main()
