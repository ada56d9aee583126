"""Files of tasks: rows of JSON lines (.jsonl, .jsonl.gz) or Parquet, and tasks from one's own
columns.

``each_task`` makes a task of every row, or says why there is none: one row that cannot be read
leaves the others alone. ``each_row`` reads rows whose columns must have certain types. ``each``
makes tasks of a file of one's own from a mapping of the project's fields to the file's columns.
What is wrong with a row is named by file, line and column.
"""

from __future__ import annotations

import ast
import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rl_code import python_source
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.tasks.forms import PATH, Form, present
from rl_code.types import Case, Layer, Task, Tests, World

_SHOWN = 80
_LIST_OR_TEXT = (list, str)

# The fields of a task that a file's columns may fill, with the types that a column may hold.
COLUMNS: Mapping[str, tuple[type, ...]] = {
    # A name that no other row has.
    "id": (str, int),
    # A chat, ``[{"role": ..., "content": ...}, ...]``, or the text of the one message. A content
    # may be parts, of which some are documents (``environment.parts``).
    "messages": _LIST_OR_TEXT,
    # Name of the function that the tests call.
    "entry_point": (str,),
    # Hidden tests: a list of statements, or one text of Python whose statements run together.
    "tests": _LIST_OR_TEXT,
    # Tests that the agent may run, in the same form.
    "visible_tests": _LIST_OR_TEXT,
    # Text of a file that solves the task; beside a suite a patch that git applies, or path -> text.
    "reference": (str, dict),
    # Path -> text of the files that the agent starts from.
    "files": (dict,),
    # Path of the file that holds the entry point.
    "path": (str,),
    # The layers below ``files``, as ``launch.layers`` prints them: ``{"layers": [{"digest": ...,
    # "at": ...}, ...], "workspace": ..., "environment": {...}}``; the last two may be missing.
    "world": (dict,),
    # A git repository that the agent works in, and the commit it starts from: a path, or a name in
    # ``places.repositories``.
    "repo": (str,),
    "commit": (str,),
    # A suite of pytest instead of an entry point and tests: ids of tests that fail before the work,
    # and of those that pass before and after it; lists, or lists in JSON. It needs pytest in the
    # world, such as ``places.packages``.
    "fail_to_pass": _LIST_OR_TEXT,
    "pass_to_pass": _LIST_OR_TEXT,
    # Path -> text of the suite's files, null for a file that must not be there; an object, or one
    # in JSON. They are hidden.
    "test_files": (dict, str),
    # "train", "validation" or "test"; a row without this column belongs to every split.
    "split": (str,),
}
REQUIRED = ("id", "messages", "entry_point", "tests")
REQUIRED_OF_SUITES = ("id", "messages", "fail_to_pass")

# Makes the task of a row with a suite: from file, line, field -> value, and field -> column.
type MakeSuite = Callable[[Path, int, Mapping[str, Any], Mapping[str, str]], Task]


class TaskFileError(ValueError):
    """A file of tasks that is missing or malformed."""


class RowError(TaskFileError):
    """One row of a file that no task can be made of; the message names file and line."""


# Id of a row, and its task or why there is none.
type Read = tuple[str, Task | RowError]


def load(
    path: str,
    columns: Mapping[str, str],
    form: Form = "chat",
    make_suite: MakeSuite | None = None,
) -> list[Task]:
    """The tasks of ``each``. Raises TaskFileError for the first row that has none."""
    return readable(each(path, columns, form, make_suite))


def each(
    path: str,
    columns: Mapping[str, str],
    form: Form = "chat",
    make_suite: MakeSuite | None = None,
) -> Iterator[Read]:
    """The tasks of a file of one's own, or why a row has none.

    path: .jsonl, .jsonl.gz or .parquet. columns: field of COLUMNS -> the file's column; those of
    REQUIRED must be there, or of REQUIRED_OF_SUITES where there is a column of tests to pass. form:
    how a message that is a plain text is put to the agent. make_suite: makes tasks with suites
    (``record_suites.make``).

    An assert ``f(<literals>) == <literal>`` becomes a value-level case; every other statement stays
    code. Raises TaskFileError for wrong ``columns`` and for a file that is missing or empty.
    """
    for field in columns:
        if field not in COLUMNS:
            raise TaskFileError(f"columns.{field}: no such field; there are {', '.join(COLUMNS)}")
    of_suites = "fail_to_pass" in columns
    if of_suites and make_suite is None:
        raise TaskFileError("columns.fail_to_pass: suites are read by the source records alone")
    for field in REQUIRED_OF_SUITES if of_suites else REQUIRED:
        if field not in columns:
            raise TaskFileError(
                f"columns.{field}: missing; name the column of {path} that holds it"
            )
    file = Path(path)
    kinds = {column: COLUMNS[field] for field, column in columns.items()}

    def make(line: int, row: dict[str, Any]) -> Task:
        fields = {field: row[column] for field, column in columns.items()}
        if make_suite is not None and of_suites:
            return make_suite(file, line, fields, columns)
        return _task(file, line, fields, columns, form)

    return each_task(file, kinds, make, columns["id"])


class HasId(Protocol):
    """A task, or what one is built of."""

    @property
    def id(self) -> str: ...


def each_task[T: HasId](
    path: Path,
    columns: Mapping[str, type | tuple[type, ...]],
    make: Callable[[int, dict[str, Any]], T | None],
    named: str = "task_id",
) -> Iterator[tuple[str, T | RowError]]:
    """(id, task) of every row, or (id, why there is none) for one that cannot be read, lacks a
    column, has the id of another one, or of which ``make`` makes none.

    columns: as of ``each_row``. make: from line and row; None leaves a row out. named: the column
    that has the ids. The id of a row without a task is its place: name of the file, and line.
    Raises TaskFileError for a file as a whole, and what else ``make`` raises as TaskFileError.
    """
    seen: set[str] = set()
    for line, row in each_row(path, columns):
        try:
            if isinstance(row, RowError):
                raise row
            task = make(line, row)
            if task is None:
                continue
            if task.id in seen:
                malformed(path, line, named, "an id that no other row has", repr(task.id))
        except RowError as error:
            yield place_of(path, line), error
        except (TaskFileError, SandboxFault):
            raise
        except Exception as error:  # rows may hold anything: each has a verdict of its own
            words = f"{type(error).__name__}: {error}"[:300]
            wrong = f"{path}, line {line}: expected a row of a task, found {words}"
            yield place_of(path, line), RowError(wrong)
        else:
            seen.add(task.id)
            yield task.id, task


def readable(rows: Iterable[Read]) -> list[Task]:
    """The tasks of rows. Raises the RowError of the first row without one."""
    tasks = []
    for _, found in rows:
        if isinstance(found, RowError):
            raise found
        tasks.append(found)
    return tasks


def place_of(path: Path, line: int) -> str:
    """The name of a row that has no task."""
    return f"{path.name}:{line}"


def _task(
    file: Path, line: int, fields: dict[str, Any], columns: Mapping[str, str], form: Form
) -> Task:
    tests = {}
    for field in ("visible_tests", "tests"):
        statements = fields.get(field, [])
        if isinstance(statements, str):
            statements = [statements]
        trees = [parse_python(file, line, columns[field], one) for one in statements]
        tests[field] = tests_of(trees, fields["entry_point"])
    reference = fields.get("reference", "")
    if not isinstance(reference, str):
        malformed(file, line, columns["reference"], "the text of a file", _show(reference))
    path = fields.get("path", PATH)
    files = fields.get("files", {})
    meta = {"source": "records", "split": fields.get("split", "")}
    shown = fields["messages"]
    if isinstance(shown, list):
        form_fields = {"messages": tuple(shown), "files": files, "prefill": ""}
    else:
        meta["description"] = shown
        form_fields = present(
            form, problem=shown, beginning=shown if form == "raw" else "", answer=""
        )
        form_fields["files"] = files or form_fields["files"]
    return Task(
        id=str(fields["id"]),
        path=path,
        entry_point=fields["entry_point"],
        visible_tests=tests["visible_tests"],
        hidden_tests=tests["tests"],
        reference={path: fields["reference"]} if "reference" in fields else {},
        meta=meta,
        world=read_world(file, line, fields["world"], columns) if fields.get("world") else None,
        **form_fields,
    )


def read_world(file: Path, line: int, row: Mapping[str, Any], columns: Mapping[str, str]) -> World:
    """The world of a row."""
    try:
        # Parquet has a value for every key that another row has.
        environment = {k: v for k, v in (row.get("environment") or {}).items() if v is not None}
        layers = tuple(Layer(layer["digest"], layer["at"]) for layer in row["layers"])
        return World(layers, row.get("workspace") or World.workspace, environment)
    except (ValueError, KeyError, TypeError) as error:
        malformed(file, line, columns["world"], "the layers of a world", f"{_show(row)} ({error})")


def tests_of(statements: list[ast.Module], entry_point: str) -> Tests:
    """``assert f(<literals>) == <literal>``, f being the entry point, as cases that compare as
    ``==`` does; the rest as code.
    """
    cases = [_case(statement, entry_point) for statement in statements]
    code = [
        ast.unparse(statement)
        for statement, case in zip(statements, cases, strict=True)
        if case is None
    ]
    return Tests(cases=tuple(case for case in cases if case is not None), code=tuple(code))


def _case(module: ast.Module, entry_point: str) -> Case | None:
    """The one assert of a module as a case; None for anything that is not on literals alone."""
    match module.body:
        case [
            ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]),
                    ops=[ast.Eq()],
                    comparators=[expected],
                )
            )
        ] if name == entry_point:
            try:
                arguments = tuple(map(ast.literal_eval, args))
                return Case(arguments, ast.literal_eval(expected), tolerance=0.0)
            except (ValueError, TypeError):
                # not a literal; a literal that Python cannot build, such as {[]}
                return None
    return None


def count_rows(path: Path) -> int:
    """Number of rows of a file, those that cannot be read included. Raises TaskFileError."""
    return sum(1 for _ in _each_row(path))


def each_row(
    path: Path, columns: Mapping[str, type | tuple[type, ...]]
) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Line number (from 1) and row of every line that is not blank, or why it cannot be read;
    ``.gz`` files are unpacked.

    columns: name -> type that every row must have there; further columns are kept as they are. A
    row of a Parquet file counts as a line.

    Raises TaskFileError when the file is missing or has no rows. A RowError names file, line and
    column, what was expected and what was found.
    """
    for line, row in _each_row(path):
        try:
            if not isinstance(row, RowError):
                check_columns(path, line, row, columns)
            yield line, row
        except RowError as error:
            yield line, error


def _each_row(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Line and row, or why it cannot be read. Raises TaskFileError for a file as a whole."""
    if path.is_dir():
        raise TaskFileError(f"{path} is a folder; name a file with a row a line, or Parquet")
    if not path.is_file():
        raise TaskFileError(
            f"{path}: no such file; looked for at {path.absolute()}, since a path that does "
            "not begin with / counts from the current folder"
        )
    rows = 0
    for line, row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        rows += 1
        yield line, row
    if not rows:
        raise TaskFileError(f"{path}: expected one task a line, found no rows")


def check_columns(
    path: Path, line: int, row: Mapping[str, Any], columns: Mapping[str, type | tuple[type, ...]]
) -> None:
    """Raises RowError for a row that lacks a column, or has another type there."""
    for column, kind in columns.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if column not in row:
            has = ", ".join(map(repr, row)) or "no columns"
            malformed(path, line, column, _names(kinds), f"nothing; the row has {has}")
        if type(row[column]) not in kinds:
            malformed(path, line, column, _names(kinds), _show(row[column]))


def malformed(path: Path, line: int, field: str, expected: str, found: str) -> NoReturn:
    """Raises the RowError for a column whose value cannot be used."""
    raise RowError(f"{path}, line {line}, field {field!r}: expected {expected}, found {found}")


def parse_python(path: Path, line: int, field: str, source: str) -> ast.Module:
    """The syntax tree of a column that must hold Python code; a RowError names the column
    otherwise.
    """
    with warnings.catch_warnings():
        # such as "\d" in an ordinary string, common in old tasks
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return python_source.parse(source)
        except SyntaxError as error:
            malformed(path, line, field, "Python code", f"{_show(source)} ({error})")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and values of every row of a Parquet file, lists and structs as Python's own."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TaskFileError(
            f"{path}: Parquet needs pyarrow; install the extra: pip install -e '.[data]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            line = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    line += 1
                    yield line, row
    except (OSError, pyarrow.ArrowException) as error:
        raise TaskFileError(f"{path}: expected a Parquet file: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    for line, text in _lines(path):
        if isinstance(text, RowError):
            yield line, text
            continue
        if not text.strip():
            continue
        begin = f"{path}, line {line}: expected a JSON object, found"
        try:
            text.encode()  # what was no UTF-8 has become a lone surrogate
            row = json.loads(text)
        except UnicodeEncodeError as error:
            yield line, RowError(f"{begin} a byte that is no UTF-8 at column {error.start}")
        except RecursionError:
            yield line, RowError(f"{begin} values nested too deep")
        except ValueError as error:
            yield line, RowError(f"{begin} invalid JSON: {error}")
        else:
            is_row = isinstance(row, dict)
            yield line, row if is_row else RowError(f"{begin} {_show(row)}")


def _lines(path: Path) -> Iterator[tuple[int, str | RowError]]:
    """Line number and text, with a lone surrogate for each byte that is no UTF-8; at last an error
    where the rest of a file cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        opened = opener(path, "rt", encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error
    with opened as file:
        lines = enumerate(file, start=1)
        line = 0
        while True:
            try:
                line, text = next(lines)
            except StopIteration:
                return
            except (EOFError, OSError, zlib.error) as error:
                where = f"{path}, line {line + 1}"
                yield line + 1, RowError(f"{where}: expected text to the file's end, found {error}")
                return
            yield line, text


def _names(kinds: tuple[type, ...]) -> str:
    words = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return " or ".join(dict.fromkeys(words[kind] for kind in kinds))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
