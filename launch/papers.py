"""Prints which claims of papers were reproduced here, by which command, and runs what is missing.

    python -m launch.papers
    python -m launch.papers --only=dapo,gspo
    python -m launch.papers --run [--only=dapo] [--workdir=runs/papers]
    python -m launch.papers --page=docs/results/papers.md

Each row has the paper and its claim, what is expected at this size, what was measured and at which
commit. With --only the commands are printed, too.

--run runs the papers that nobody ran, one after another; with --only those that it names, also
where they were measured before. The same command goes on where it was stopped, since each run has a
folder in the workdir; what has ended well is not run again. A paper that fails does not hold up the
others.

The rows are in configs/papers/table.toml. After a run, write what came out and the commit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rich.table
from absl import flags
from rich.markup import escape

from launch import command
from launch.workdir import WORKDIR
from rl_code.host.stop import INTERRUPTED
from sweeps import papers as papers_lib
from sweeps.papers import Paper

FLAGS = flags.FLAGS
# Folder of the runs where --workdir names none.
RUNS = "runs/papers"


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 where a paper failed, 2 where all that failed would do so again."""
    workdir = Path(WORKDIR.value or RUNS)
    if Path.cwd() != papers_lib.ROOT:  # in which the commands run
        workdir = workdir.resolve()
    everything = papers_lib.read()
    chosen = papers_lib.select(everything, FLAGS.only)
    if FLAGS.page:
        Path(FLAGS.page).write_text(papers_lib.page(everything, RUNS))
        print(f"Page: {FLAGS.page}")
        return 0
    code = run(chosen, workdir) if FLAGS.run else 0
    console = command.console()
    console.print(table(chosen, workdir))
    if not FLAGS.run:
        for line in last_lines(everything, chosen, workdir):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    return code


def last_lines(everything: Sequence[Paper], chosen: Sequence[Paper], workdir: Path) -> list[str]:
    """The commands of papers that were asked for, else which command shows and runs them."""
    if FLAGS.only:
        return [line for paper in chosen for line in paper.shown_commands(str(workdir))]
    missing = ", ".join(paper.name for paper in papers_lib.missing(everything, workdir, ()))
    return [
        f"python -m launch.papers --only={everything[0].name} shows the commands of one.",
        f"--run runs those that nobody ran: {missing or 'none'}.",
    ]


def run(chosen: Sequence[Paper], workdir: Path) -> int:
    """Runs what is missing of the chosen papers, and says what failed."""
    # They import jax, which the table does without.
    from rl_code.run import provenance
    from sweeps.running import Interrupts

    missing = papers_lib.missing(chosen, workdir, FLAGS.only)
    workdir.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} papers to run: {', '.join(paper.name for paper in missing)}", flush=True)
    failed: dict[str, int] = {}
    commit = provenance.commit()
    with Interrupts() as interrupts:
        for number, paper in enumerate(missing, start=1):

            def say(words: str, at: int = number) -> None:
                print(f"[{at}/{len(missing)}] {words}", flush=True)

            try:
                code = papers_lib.run(paper, workdir, commit, interrupts, say)
            except KeyboardInterrupt:
                print("stopped; the same command goes on where it was", flush=True)
                return INTERRUPTED
            if code:
                failed[paper.name] = code
                say(f"{paper.name} failed with exit code {code}")
    return 2 if set(failed.values()) == {2} else int(bool(failed))


def table(papers: Sequence[Paper], workdir: Path) -> rich.table.Table:
    """One row for each paper, with what became of it in the workdir, if any of them ran there.

    Configs are named from the folder configs on.
    """
    view = rich.table.Table()
    states = [here(paper, workdir) for paper in papers]
    names = ["name", "paper", "claim", "config", "expected", "measured", "commit"]
    for name in names + ["here"] * any(states):
        view.add_column(name, overflow="fold", no_wrap=name in ("name", "config", "commit"))
    for paper, state in zip(papers, states, strict=True):
        cells = (
            paper.name,
            f"{paper.title} ({paper.arxiv})",
            paper.claim,
            "\n".join(config.removeprefix("configs/") for config in paper.configs),
            paper.expected,
            paper.result,
            "\n".join(paper.commits),
            state,
        )
        view.add_row(*map(escape, cells[: len(view.columns)]))
    return view


def here(paper: Paper, workdir: Path) -> str:
    """State of a paper's runs in the workdir."""
    found = papers_lib.done(paper, workdir)
    if found is None:
        return ""
    return f"ran in {found['seconds'] / 60:.0f} min at {found['commit'][:7]}"


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_bool("run", False, "Run what is missing.")
    flags.DEFINE_list("only", [], "Names of papers; all by default.")
    flags.DEFINE_string("page", None, "File that the table is written to, as a page of the docs.")


if __name__ == "__main__":
    define_flags()
    command.run(main, arguments=False)
