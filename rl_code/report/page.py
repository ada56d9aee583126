"""One HTML page about a run, or about two runs side by side.

It shows what was run (config, commit, hardware), evaluations, curves, where the time went, and a
reader for trajectories. It reads what a run leaves in its working directory, at any time, even
while the run goes on. The page holds its own style, scripts and data. It needs no network and opens
from a file. Everything that a model wrote enters it as JSON and reaches the document as text only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import numpy as np

from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.host.files import write_atomically
from rl_code.metrics.values import read_metrics
from rl_code.report import about
from rl_code.report.curves import curves, with_actors
from rl_code.report.evaluations import by_step, by_suite, paired, signed, suites
from rl_code.report.trajectories import trajectories
from rl_code.run.step_metrics import taught

ASSETS = Path(__file__).parent / "assets"
WARM_START = "sft"
# The share of steps without a signal from which on the page warns.
_MANY = 0.25


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Content of the page."""

    # The k of pass@k to show.
    ks: tuple[int, ...] = (1, 8)
    # At most this many trajectories of one step, or of one evaluation.
    trajectories_per_step: int = 16
    # At most this many steps, spread over the run.
    trajectory_steps: int = 24
    # The size that the page stays below.
    megabytes: float = 4.8

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"{self.ks=} must hold at least one k, each at least 1")


def write_report(
    workdirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    config: ReportConfig | None = None,
    title: str = "",
    search: str = "",
) -> Path:
    """Writes the page and returns its path.

    Args:
      workdirs: the folder of a run, or of two runs; the second is shown beside the first.
      path: the file to write.
      config: what goes into the page.
      title: the name of the first folder unless given.
      search: holds only the trajectories with this text, found among all of the run.

    Raises:
      ValueError: damaged files of the run, or curves that alone exceed the size.
      OSError: the disk is full.
    """
    config = config or ReportConfig()
    runs = (
        [Path(workdirs)] if isinstance(workdirs, str | os.PathLike) else list(map(Path, workdirs))
    )
    names = about.names(runs)
    folders = dict(zip(names, runs, strict=True))
    rows = {name: with_actors(run, read_metrics(run)) for name, run in folders.items()}
    results = {name: suite.load_all(run) for name, run in folders.items()}
    limit = int(config.megabytes * 1e6)
    tables = {
        "tiles": _tiles(rows[names[0]], results[names[0]]),
        "warnings": [warning for name, own in rows.items() for warning in silent(own, name)],
        "runs": about.runs(runs, names),
        "config": about.config_table(runs),
        "suites": suites(results, config.ks),
    }
    data = {
        "curves": curves(rows),
        "evaluations": by_step(results, config.ks),
        "warm_start": curves(
            {name: read_metrics(run / WARM_START) for name, run in folders.items()}
        ),
        "trajectories": {},
    }
    title = title or " and ".join(names)
    room = limit - len(_render(title, tables, data))
    data["trajectories"] = trajectories(
        folders,
        steps=config.trajectory_steps,
        per_source=config.trajectories_per_step,
        room=room,
        search=search,
    )
    page = _render(title, tables, data)
    if len(page) > limit:
        raise ValueError(
            f"the report without trajectories is {len(page)} bytes, above {config.megabytes=}"
        )
    write_atomically(Path(path), page)
    return Path(path)


def _render(title: str, tables: Mapping[str, Any], data: Mapping[str, Any]) -> bytes:
    """The page: ``tables`` are written into its text, ``data`` is what its scripts draw."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [_without_comments(ASSETS / name) for name in ("charts.js", "reader.js")]
    text = environment.get_template("page.html.jinja").render(
        title=title,
        **tables,
        style=markupsafe.Markup((ASSETS / "page.css").read_text()),
        scripts=[markupsafe.Markup(script) for script in scripts],
        payload=markupsafe.Markup(embedded(data)),
    )
    return text.encode()


def _without_comments(script: Path) -> str:
    """A script without comments and indentation: room for trajectories. No text of the scripts goes
    over several lines.
    """
    lines = [line.lstrip() for line in script.read_text().splitlines(keepends=True)]
    return "".join(line for line in lines if not line.startswith(("//", "/**")))


def embedded(data: Any) -> str:
    """JSON for a script element, which only "<" could end; plain ASCII, so that lone surrogates can
    be written.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def silent(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """A warning where many steps of a run had nothing to learn from."""
    known = [row for row in rows if "reward/signal_groups" in row]
    without = [row for row in known if not taught(row)]
    if len(without) < 3 or len(without) < _MANY * len(known):
        return []
    share = np.mean([1.0 - row["reward/signal_groups"] for row in known])
    calls = [row.get("episode/malformed_calls") for row in known]
    malformed = np.mean([number or 0.0 for number in calls])
    words = f"; episodes had {malformed:.1f} malformed calls on average"
    counted = any(number is not None for number in calls)  # in dumps of others nobody does
    return [
        f"In {len(without)} of {len(known)} training steps of {name} no group had rewards that "
        f"differ and nothing else taught. Of all groups {share:.0%} had no signal"
        f"{words if counted else ''}. The page docs/no_reward.md says what to look at."
    ]


def _tiles(
    rows: Sequence[Mapping[str, Any]], results: Sequence[SuiteResult]
) -> list[tuple[str, str, str]]:
    """(what, number, remark) of the few numbers that say how the run went."""
    tiles = []
    for found in by_suite(results):
        comparison = paired(found[0], found[-1], 1) if len(found) > 1 else None
        if comparison:
            change = signed(comparison.difference)
            numbers = f"{comparison.before.mean:.1%} → {comparison.after.mean:.1%}"
            tiles.append((f"{found[0].suite} pass@1", numbers, change))
    if rows:
        tiles.append(("steps", f"{len(rows):,}", f"{rows[0]['step']} to {rows[-1]['step']}"))
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    if seconds:
        hours, minutes = divmod(round(sum(seconds) / 60), 60)
        total = f"{hours} h {minutes} min" if hours else f"{sum(seconds) / 60:.1f} min"
        tiles.append(("time in steps", total, f"{np.median(seconds):.2f} s per step, median"))
    return tiles
