"""Tasks from rows of one's own: a mapping of the project's fields to a file's columns."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_code.tasks.forms import PATH, Form, present
from rl_code.tasks.row_files import (
    Read,
    TaskFileError,
    each_task,
    malformed,
    parse_python,
    readable,
    show,
)
from rl_code.types import Case, Layer, Task, Tests, World

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
        malformed(file, line, columns["reference"], "the text of a file", show(reference))
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


def row_of(task: Task) -> dict[str, Any]:
    """The row of which ``each`` makes a task: what an agent's program that knows its task sends as
    ``record`` (``people.realtime.cases``). There is no column for tests of other functions than the
    entry point, and none for a tolerance. Raises ValueError for a task without a test that a row
    can hold.
    """
    tests = {}
    for field, given in (("visible_tests", task.visible_tests), ("tests", task.hidden_tests)):
        own = [case for case in given.cases if not case.target]
        calls = (", ".join(map(repr, case.args)) for case in own)
        tests[field] = [
            f"assert {task.entry_point}({call}) == {case.expected!r}"
            for call, case in zip(calls, own, strict=True)
        ] + list(given.code)
    if not tests["tests"] or task.world is not None:
        raise ValueError(f"task {task.id}: a row holds neither suites nor worlds, and needs tests")
    own = {"path": task.path, "entry_point": task.entry_point, "files": dict(task.files)}
    return {"id": task.id, "messages": [*map(dict, task.messages)], **own, **tests}


def read_world(file: Path, line: int, row: Mapping[str, Any], columns: Mapping[str, str]) -> World:
    """The world of a row."""
    try:
        # Parquet has a value for every key that another row has.
        environment = {k: v for k, v in (row.get("environment") or {}).items() if v is not None}
        layers = tuple(Layer(layer["digest"], layer["at"]) for layer in row["layers"])
        return World(layers, row.get("workspace") or World.workspace, environment)
    except (ValueError, KeyError, TypeError) as error:
        malformed(file, line, columns["world"], "the layers of a world", f"{show(row)} ({error})")


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
