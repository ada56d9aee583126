"""Sources of tasks by name, and one function that finds them."""

from __future__ import annotations

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.source import Source

# A source is imported when a config names it.
SOURCES = {
    "generated": "rl_code.tasks.generated:Generated",
    "lookup": "rl_code.tasks.lookup_source:Lookup",
    "repositories": "rl_code.tasks.repository_source:Repositories",
    "infill": "rl_code.tasks.infill:Infill",
    "jumps": "rl_code.tasks.jumps:Jumps",
    "holes": "rl_code.tasks.holes:Holes",
    "mbpp": "rl_code.tasks.mbpp:Mbpp",
    "humaneval": "rl_code.tasks.humaneval:HumanEval",
    "evalplus": "rl_code.tasks.evalplus:EvalPlus",
    "records": "rl_code.tasks.record_source:Records",
    "subtasks": "rl_code.tasks.subtasks:Subtasks",
    "first": "rl_code.tasks.first:First",
    "mixed": "rl_code.tasks.mixed:Mixed",
    "sums": "rl_code.tasks.sums:Sums",
    "contradictory": "rl_code.tasks.contradictory:Contradictory",
    "swe": "rl_code.tasks.swe:Swe",
    "harbor": "rl_code.tasks.harbor:Harbor",
    "exercism": "rl_code.tasks.exercism:Exercism",
    "quixbugs": "rl_code.tasks.quixbugs:QuixBugs",
    "humanevalfix": "rl_code.tasks.humanevalfix:HumanEvalFix",
    "leetcode": "rl_code.tasks.leetcode:LeetCode",
    "made": "rl_code.tasks.made:Made",
    "verifiers": "rl_code.tasks.verifiers:Verifiers",
}


def find_source(config: Named, path: str) -> Source:
    """The source that a config names, with its settings.

    path: dotted key of the config, for messages.

    Raises:
      ConfigError: no such source, or settings that it does not take.
    """
    source = named.make(SOURCES, config, path)
    if not isinstance(source, Source):
        raise ConfigError(f"{path} = {config.name!r}: {source!r} is no rl_code.tasks.source.Source")
    return source
