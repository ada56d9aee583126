"""Seconds and CPU seconds of each test, by kind, in the summary of a run (``--costs``).

CPU seconds hold where other programs use the cores, too. Those of child processes count where they
are waited for. Tracing, lowering and compiling are seconds that passed in this process, by jax's own
events; what is left of a test's seconds when they and its CPU seconds are taken away is waiting.
"""

from __future__ import annotations

import collections
import json
import resource
import time

import jax.monitoring
import pytest

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
KINDS = ("seconds", "cpu", "children", "trace", "lower", "compile")

# Ends and lengths of what jax did since the test began, by kind.
_spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in EVENTS.values()}


def _record(event: str, seconds: float, **_: object) -> None:
    if event in EVENTS:
        _spans[EVENTS[event]].append((time.perf_counter(), seconds))


def _union(spans: list[tuple[float, float]]) -> float:
    """Seconds that any of the spans covers: a traced function traces those that it calls."""
    total, covered = 0.0, float("inf")
    for end, seconds in sorted(spans, reverse=True):
        total += max(0.0, min(end, covered) - (end - seconds))
        covered = min(covered, end - seconds)
    return total


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


class Costs:
    """Measures every test in its worker, and tells of all of them at the end of the run."""

    def __init__(self, shown: int, file: str | None):
        self._shown = shown
        self._file = file
        self._rows: dict[str, dict[str, float]] = {}
        jax.monitoring.register_event_duration_secs_listener(_record)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        for spans in _spans.values():
            spans.clear()
        item.stash[_BEGIN] = (time.perf_counter(), *map(_cpu, _WHO))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        if call.when == "teardown":
            ends = (time.perf_counter(), *map(_cpu, _WHO))
            row = [end - begin for end, begin in zip(ends, item.stash[_BEGIN], strict=True)]
            row += [_union(_spans[kind]) for kind in EVENTS.values()]
            report.user_properties.append(("costs", row))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, row in report.user_properties:
            if name == "costs" and report.when == "teardown":
                self._rows[report.nodeid] = dict(zip(KINDS, row, strict=True))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._file:
            with open(self._file, "w") as file:
                json.dump(self._rows, file)
        if not self._shown:
            return
        files: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for test, row in self._rows.items():
            files[test.partition("::")[0]].update(row)
        every: collections.Counter = collections.Counter()
        for row in files.values():
            every.update(row)
        for title, rows in (("tests", self._rows), ("files", files), ("all", {"all": every})):
            if title != "all":
                terminalreporter.section(f"{title} with the most CPU seconds")
            terminalreporter.write_line(" ".join(f"{kind:>8}" for kind in KINDS))
            for name in sorted(rows, key=lambda name: -_used(rows[name]))[: self._shown]:
                numbers = " ".join(f"{rows[name][kind]:8.1f}" for kind in KINDS)
                terminalreporter.write_line(f"{numbers} {name}")


_BEGIN = pytest.StashKey[tuple[float, ...]]()
_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _used(row: dict[str, float]) -> float:
    return row["cpu"] + row["children"]
