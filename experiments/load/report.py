"""Results of a load, as numbers and as a table."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import rich.table

from experiments.load.audit import Told
from experiments.load.program import Life

_MIB = 2**20


def measured(told: Told, lives: Sequence[Life], span: tuple[float, float]) -> dict[str, Any]:
    """Latencies, rates and memory. span: Unix seconds of the part with kills."""
    during = [one for one in told.answers.values() if span[0] <= one["at"] <= span[1]]
    reasons = collections.Counter(_reason(one) for one in told.failed)
    seconds = span[1] - span[0]
    return {
        "first_token_s": quantiles([one["first_s"] for one in during]),
        "whole_answer_s": quantiles([one["whole_s"] for one in during]),
        "answers_per_s": len(during) / seconds,
        "tokens_per_s": sum(one["tokens"] for one in during) / seconds,
        "failed": dict(reasons.most_common()),
        "lives": [life_of(life) for life in lives],
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile; empty of nothing."""
    if not values:
        return {}
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 99)}


def life_of(life: Life) -> dict[str, Any]:
    """Lifetime of a process, and its memory while it was ready."""
    ready = life.ready_s if life.ready_s is not None else float("inf")
    memory = [(at, size / _MIB) for at, size in life.memory if at >= ready]
    found: dict[str, Any] = {
        "began_s": round(life.began_s, 1),
        "ready_after_s": None if life.ready_s is None else round(life.ready_s - life.began_s, 1),
        "lived_s": None if life.ended_s is None else round(life.ended_s - life.began_s, 1),
    }
    if memory:
        sizes = np.array([size for _, size in memory])
        found["mib"] = {
            "first": round(sizes[0]),
            "half": round(sizes[len(sizes) // 2]),
            "last": round(sizes[-1]),
            "most": round(sizes.max()),
        }
        found["memory"] = [(round(at, 1), round(size, 1)) for at, size in memory]
    # a line through the second half, when all has been used once
    later = np.array(memory[len(memory) // 2 :])
    if len(later) > 10:
        slope = np.polyfit(later[:, 0], later[:, 1], 1)[0]
        found["mib_per_minute"] = round(float(60 * slope), 2)
    return found


def table(found: dict[str, Any]) -> rich.table.Table:
    """One row for each thing."""
    view = rich.table.Table("what", "measured", title=f"{found['flags']['clients']} clients")
    struck = collections.Counter(one["what"] for one in found["strikes"])
    view.add_row("kills", ", ".join(f"{count} {what}" for what, count in struck.items()) or "none")
    states = collections.Counter(one["state"] or "starting" for one in found["strikes"])
    view.add_row("in the states", ", ".join(f"{count} {what}" for what, count in states.items()))
    for name, count in found["audit"]["counts"].items():
        view.add_row(name, f"{count:,}")
    for name in ("first_token_s", "whole_answer_s"):
        values = (f"{q} {value:.2f} s" for q, value in found[name].items())
        view.add_row(name.removesuffix("_s").replace("_", " "), ", ".join(values))
    view.add_row(
        "answers/s, tokens/s", f"{found['answers_per_s']:.1f}, {found['tokens_per_s']:.0f}"
    )
    if beside := found["beside"]:
        pairs = ", ".join(f"{one['served']:.0f} of {one['bare']:.0f}" for one in beside["rounds"])
        view.add_row("tokens/s served, of the engine alone", pairs)
        view.add_row("ratio, median", f"{beside['ratio']:.2f}")
        pairs = ", ".join(
            f"{one['served_per_cpu_s']:.0f} of {one['bare_per_cpu_s']:.0f}"
            for one in beside["rounds"]
        )
        view.add_row("the same per second of processor time", pairs)
        view.add_row("ratio, median", f"{beside['ratio_per_cpu_s']:.2f}")
    for number, life in enumerate(found["lives"]):
        if "mib" in life:
            sizes = ", ".join(f"{name} {size}" for name, size in life["mib"].items())
            slope = life.get("mib_per_minute")
            more = "" if slope is None else f"; {slope:+.1f} a minute in its second half"
            view.add_row(f"life {number + 1}: {life['lived_s']} s, MiB", sizes + more)
    for why, count in found["failed"].items():
        view.add_row(f"requests without an answer: {why}", str(count))
    for problem in found["audit"]["problems"]:
        view.add_row("[red]problem[/red]", problem)
    return view


def _reason(line: dict[str, Any]) -> str:
    """Reason why a request failed, in few words."""
    if "status" in line:
        return f"status {line['status']}"
    return line["why"].partition(":")[0][:60]
