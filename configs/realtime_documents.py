"""An agent that reads documents, in the cycle: each file of a want is encoded alone.

What: the agent of configs/long_context.py with each file as a document is served over HTTP, in the
  cycle of configs/realtime_agent.py. Simulated people show it the files with their want, as parts
  of the type document of a message, and say what is wrong where it is. Records keep what each token
  was, so an update computes the mask that sampled, and suites are played with it too. The keys of a
  file are kept by content, in memory and in the folder documents of the workdir.
Command: python -m launch.realtime --config=configs/realtime_documents.py
  --workdir=runs/realtime_documents --cycles=3
Hardware: 2 CPU cores. Run time: not run; the model of runs/long_base/squid comes first
  (configs/long_context_base.py). configs/realtime_documents.py:smoke takes two minutes.
Expected metric: as configs/realtime_agent.py; here the smoke test shows that a cycle ends.
"""

import ml_collections

from configs import long_context, realtime_agent

# Answers of an update: those of configs/realtime_agent.py, and of the smoke test.
UPDATE, SMOKE = realtime_agent.UPDATE, 32
# Tokens behind a want: what was written, and what was wrong with it.
BEHIND = 512


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (two minutes: from random parameters, three files of 50 tokens)."""
    if arg not in ("", "smoke"):
        raise ValueError(
            f"configs/realtime_documents.py:{arg}: the argument must be empty or smoke"
        )
    smoke = arg == "smoke"
    config = realtime_agent.get_config(arg)
    run = _run(smoke)
    with config.ignore_type():
        config.parts.run = run
        config.parts.agents.tasks = {**run.tasks.to_dict(), "split": "train", "seed": 7}
        config.parts.agents.tools = run.tools
    if smoke:
        config.cycle.update(batch=SMOKE, least_sessions=8)
    return config


def _run(smoke: bool) -> ml_collections.ConfigDict:
    """The agent that is served and trained."""
    config = long_context.get_config("smoke" if smoke else "squid")
    update = SMOKE if smoke else UPDATE
    with config.ignore_type():
        config.documents = long_context.DOCUMENTS
        config.model.attention = (*[long_context.LOCAL] * 2, long_context.METHODS["squid"])
        config.rollout.engine.page = long_context.PAGES["squid"]
        config.tools = ("edit_file", "submit")
        # names of the tools over the API, and in suites
        config.serving = dict(edit_tools=("edit", "edit_file"), documents_mb=64.0)
        config.limits.update(turns=6, tokens=config.limits.tokens + BEHIND)
        config.train.update(tasks_per_step=update, group_size=1, micro_batches=8 if smoke else 80)
        rows = update if smoke else update // 2
        config.train.pack = dict(slots=config.limits.tokens, targets=256, rows=rows)
        config.train.optimizer = dict(learning_rate=7e-4, warmup_steps=4)
        if smoke:
            config.suites[0].update(count=8, samples=1)
    config.mesh.update(data=1)
    return config
