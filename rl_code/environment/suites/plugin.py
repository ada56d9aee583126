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
                   ran     an id, "passed" or why it did not, in one line
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


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(items):
    """Leaves the tests that the host wants, each of which may be there once."""
    yield
    times = {}
    for item in items:
        times[item.nodeid] = times.get(item.nodeid, 0) + 1
    items[:] = [item for item in items if item.nodeid in WANTED and times[item.nodeid] == 1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    """Tells which tests will run."""
    LINE.say("found", *[item.nodeid for item in session.items])


def pytest_collectreport(report):
    """Tells which files cannot be collected."""
    if report.failed:
        LINE.say("broken", report.nodeid, said(report))


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
    LINE.say("ran", nodeid, outcome(REPORTS.pop(nodeid, [])))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Tells that no more tests follow."""
    LINE.say("end")


def outcome(reports):
    """ "passed", or why a test with these reports did not pass."""
    for report in reports:
        if report.failed:
            return said(report)
        if hasattr(report, "wasxfail"):
            return "xpassed" if report.passed else "xfailed"
        if report.skipped:
            return "skipped"
    parts = {report.when for report in reports}
    return "passed" if {"setup", "call", "teardown"} <= parts else "did not run to its end"


def said(report):
    """Why a report failed, in one line."""
    text = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    text = text or "\n".join(str(report.longrepr).strip().splitlines()[-3:])
    return " ".join(text.split())[:MESSAGE_CHARACTERS] or "failed"
