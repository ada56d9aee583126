"""A plugin of pytest that says over a socket which tests ran and how each ended.

It runs in the candidate's interpreter, so whatever it says can be forged there; what is made of it
is the business of ``runner.py``, on the other side. It uses nothing but the standard library and
pytest, of any version since Python 3.6, because it runs where a repository's own world has them.

Lines go both ways; fields stand between tabs, with everything but printable ASCII escaped.

  from the host  a number that nobody can guess; with the answer to "ready" also the ids to run
  to the host    the number that came last, a word, and what belongs to it:
                   ready
                   found   ids that are there and will run
                   broken  a file that cannot be collected, and why
                   ran     an id, "passed" or why it did not, in one line, and the subtests that
                           were skipped
                   end
"""

import difflib  # noqa: F401  what pytest imports late must not be looked for in the workspace
import doctest  # noqa: F401
import os
import pdb  # noqa: F401
import pprint  # noqa: F401
import random
import sys
import unittest  # noqa: F401

import pytest

VARIABLE = "RL_CODE_SUITE"
MESSAGE_CHARACTERS = 400


class Line:
    """The way to the host. Only the process that opened it speaks, not what it forks."""

    def __init__(self, descriptor):
        # Bound now: tests may replace functions of os.
        self._read = os.read
        self._write = os.write
        self._process_of = os.getpid
        self._process = os.getpid()
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)
        self._number = self._answer()[0]

    def say(self, word, *fields):
        """Tells the host something and returns the fields of its answer behind the number."""
        if self._process_of() != self._process:
            return []
        text = "\t".join([self._number, word] + [escaped(field) for field in fields]) + "\n"
        data = text.encode()
        while data:
            data = data[self._write(self._descriptor, data) :]
        self._number, *rest = self._answer()
        return [field.encode().decode("unicode_escape") for field in rest]

    def _answer(self):
        data = b""
        while not data.endswith(b"\n"):
            part = self._read(self._descriptor, 65536)
            if not part:
                os._exit(3)  # the host has gone
            data += part
        return data.decode().rstrip("\n").split("\t")


def escaped(text):
    """The text in printable ASCII, without tabs and line ends."""
    return str(text).encode("unicode_escape", "replace").decode()


def set_up():
    """Hides from tests, and from programs that they start, what was set for this plugin alone."""
    descriptor, first = os.environ.pop(VARIABLE).split(",")
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != own]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [entry for entry in paths if entry and entry != own]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    # As ``python -m`` does it, but only now: modules of the workspace do not stand in for those
    # that pytest and this plugin import.
    if os.environ.pop("PYTHONSAFEPATH", None) and first and hasattr(sys.flags, "safe_path"):
        sys.path.insert(0, first)
    return Line(int(descriptor))


# Elsewhere than under the grader this module does nothing.
LINE = set_up() if VARIABLE in os.environ else None
WANTED = set(LINE.say("ready")) if LINE else set()
REPORTS = {}


# Beginning of ids: the folder that pytest takes for its root, seen from the workspace.
PREFIX = [""]


def pytest_plugin_registered(plugin, manager):
    """Takes the plugins that a suite's settings ask for out of them: none is loaded."""
    if plugin is manager.get_plugin("pytestconfig"):
        settings_of(plugin).pop("required_plugins", None)


@pytest.hookimpl(hookwrapper=True)
def pytest_load_initial_conftests(early_config, parser, args):
    """Leaves out options and settings of plugins, which nobody knows without them."""
    yield
    given = len(early_config.invocation_params.args)
    args[:] = [*known(args[: len(args) - given], parser), *args[len(args) - given :]]
    settings = settings_of(early_config)
    for name in set(settings) - set(parser._inidict) - set(getattr(parser, "_ini_aliases", ())):
        parser.addini(name, "of a plugin that is not loaded")


def settings_of(config):
    """The settings of pytest's file, by name."""
    return config._inicfg if hasattr(config, "_inicfg") else config.inicfg


def known(arguments, parser):
    """The options among arguments that pytest and the files conftest.py know, with their values."""
    kept = []
    while arguments:
        count = 1
        while count < len(arguments) and not arguments[count].startswith("-"):
            count += 1
        option, arguments = arguments[:count], arguments[count:]
        try:
            unknown = parser.parse_known_and_unknown_args(list(option))[1]
        except pytest.UsageError:  # pytest will say what is wrong
            unknown = []
        if option[0] not in unknown:
            kept += option
    return kept


def pytest_configure(config):
    """Notes where ids begin: a file of settings beside the tests makes its folder the root."""
    root = getattr(config, "rootpath", None) or config.rootdir
    path = os.path.relpath(str(root), str(config.invocation_params.dir))
    if path != os.curdir and not path.startswith(os.pardir):
        PREFIX[0] = path.replace(os.sep, "/") + "/"


def id_of(node):
    """The id of a test or a file, seen from the workspace."""
    return PREFIX[0] + node.nodeid


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(items):
    """Leaves the tests that the host wants, each of which may be there once."""
    yield
    times = {}
    for item in items:
        times[id_of(item)] = times.get(id_of(item), 0) + 1
    items[:] = [item for item in items if id_of(item) in WANTED and times[id_of(item)] == 1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    """Tells which tests will run."""
    LINE.say("found", *[id_of(item) for item in session.items])


def pytest_collectreport(report):
    """Tells which files cannot be collected."""
    if report.failed:
        LINE.say("broken", id_of(report), said(report))


def pytest_runtest_logstart(nodeid, location):
    """Makes every test start from the same random numbers, whichever ran before it."""
    REPORTS[nodeid] = []
    random.seed(0)


def pytest_runtest_logreport(report):
    """Notes how a part of a test ended: its set-up, the test itself, its tear-down."""
    REPORTS.setdefault(report.nodeid, []).append(report)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid, location):
    """Tells how a test ended."""
    reports = REPORTS.pop(nodeid, [])
    skipped = [subtest(one) for one in reports if is_skipped_subtest(one)]
    LINE.say("ran", PREFIX[0] + nodeid, outcome(reports), *skipped)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Tells that no more tests follow."""
    LINE.say("end")


def outcome(reports):
    """ "passed", or why a test with these reports did not pass."""
    for report in reports:
        if report.failed:
            return said(report)
        if is_skipped_subtest(report):
            continue
        if hasattr(report, "wasxfail"):
            return "xpassed" if report.passed else "xfailed"
        if report.skipped:
            return "skipped"
    parts = {report.when for report in reports if not is_of_subtest(report)}
    return "passed" if {"setup", "call", "teardown"} <= parts else "did not run to its end"


def is_of_subtest(report):
    """True for what pytest, or its plugin, says of a subtest and not of a whole test."""
    return type(report).__name__.lower() == "subtestreport"


def is_skipped_subtest(report):
    """True for a subtest that was skipped, or failed as expected."""
    return is_of_subtest(report) and report.skipped


def subtest(report):
    """A name for a subtest among those of its test."""
    return " ".join(str(getattr(report, "context", "")).split())[:MESSAGE_CHARACTERS]


def said(report):
    """Reason why a report failed, in one line."""
    text = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    text = text or "\n".join(str(report.longrepr).strip().splitlines()[-3:])
    return " ".join(text.split())[:MESSAGE_CHARACTERS] or "failed"
