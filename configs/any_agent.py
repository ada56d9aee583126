"""An agent of the command line that somebody else wrote: codex, opencode, Claude Code, aider.

What: the unmodified program plays the episodes inside of their sandboxes, with its own tools and
  prompts, and asks the policy by its own API (docs/agents_of_others.md); any weights with a chat
  template. ``:smoke`` is a model of 1 M parameters from scratch, and prompts as short as the
  program allows. The argument names an agent of AGENTS, with ",smoke" behind it: codex,smoke.
Command: npm install --prefix agents @openai/codex@0.171.0 opencode-ai@1.18.33
    @anthropic-ai/claude-code@2.1.197
  python -m venv agents/aider && agents/aider/bin/pip install aider-chat==0.86.2
  python -m launch.train --config=configs/any_agent.py:codex --workdir=runs/codex
    --config.model.weights=...
  Any other program: --config.harness.name=command_line (docs/agents_of_others.md)
Hardware: what --dry_run says. Run time: not run in full; ``:smoke`` takes a minute of CPU time.
Expected metric: reward/solved rises; not run
"""

import ml_collections

from configs import repositories

WEIGHTS = "weights/Qwen2.5-Coder-0.5B-Instruct"
AGENTS = dict(
    codex=dict(name="codex"),
    opencode=dict(name="opencode"),
    opencode_acp=dict(name="opencode", acp=True),
    claude_code=dict(name="claude_code"),
    aider=dict(name="aider"),
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: an agent of AGENTS, codex where none is named, and "smoke" (a minute)."""
    words = [word for word in arg.split(",") if word]
    smoke = "smoke" in words
    names = [word for word in words if word != "smoke"] or ["codex"]
    if len(names) > 1 or names[0] not in AGENTS:
        known = ", ".join(AGENTS)
        raise ValueError(f"configs/any_agent.py:{arg}: the argument must be one of {known}, smoke")
    config = dict(
        mesh=dict(data=0),  # every device
        model=dict(weights=WEIGHTS, remat=True),
        protocol="hermes",
        tasks=repositories.repositories(split="train"),
        harness=dict(folder="agents", short=smoke, **AGENTS[names[0]]),
        limits=dict(
            turns=24, tokens=32768, turn_tokens=1024, test_runs=0, command_s=10.0, tools_s=300.0
        ),
        reward=dict(signals=("tests",)),
        rollout=dict(dtype="bfloat16", workers=8),
        train=dict(
            steps=200,
            tasks_per_step=8,
            group_size=8,
            optimizer=dict(learning_rate=1e-6, warmup_steps=10),
        ),
        suites=(repositories.held_out("held_out", (0, 1, 2), 64) | dict(samples=4),),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if smoke:
        _shrink(config)
    return config


def _shrink(config: ml_collections.ConfigDict) -> None:
    """A model from scratch, a step of two episodes."""
    config.mesh = dict(data=1)
    config.model = dict(preset="tiny")
    # a tokenizer of one's own is made of demonstrations
    config.tokenizer = dict(source="train", vocab_size=512, texts=200)
    config.tasks = dict(name="generated", split="train", levels=(1,))
    config.limits.update(turns=2, tokens=8192, turn_tokens=16)
    config.rollout = dict(
        workers=2,
        engine=dict(slots=2, page=16, prefill_rows=2, prefill_tokens=256, prompt_length=6144),
    )
    config.train.update(steps=1, tasks_per_step=1, group_size=2)
    config.train.loss = dict(entropy_coef=0.01)
    config.train.pack = dict(drop_uninformative=False, slots=8192, targets=128, rows=2)
    config.suites = ()
    config.checkpoint = dict(every=1)
