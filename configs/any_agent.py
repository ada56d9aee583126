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
Hardware: what --dry_run says. Run time: not run in full; ``:smoke`` takes a minute of CPU time.
Expected metric: reward/solved rises; not run
"""

import json

import ml_collections

from configs import repositories

WEIGHTS = "weights/Qwen2.5-Coder-0.5B-Instruct"
_NODE = "agents/node_modules"
_OPENAI = (("OPENAI_API_KEY", "{key}"), ("OPENAI_API_BASE", "{url}"))
_CODEX = """
model_provider = "local"
web_search = "disabled"
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
_SHORT_CODEX = """
model_instructions_file = "/tmp/codex/short.md"
agents = {enabled = false}
include_permissions_instructions = false
include_environment_context = false
features = {goals = false, shell_snapshot = false}
"""


def codex(short: bool) -> dict:
    """OpenAI's codex, over the Responses API."""
    home = "/tmp/codex"
    files = [(f"{home}/config.toml", (_SHORT_CODEX if short else "") + _CODEX)]
    files += [(f"{home}/short.md", "Call exec_command.")] if short else []
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    vendor = f"{_NODE}/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
    return dict(
        command=("{programs}/codex", "exec", *options, "-m", "{model}", "{task}"),
        environment=(("CODEX_HOME", home), *_OPENAI),
        files=tuple(files),
        programs=(vendor,),
    )


def opencode(short: bool, *words: str) -> dict:
    """opencode, over chats. words: of its command line; () for one task without a protocol."""
    options = dict(baseURL="{url}", apiKey="{key}")
    model = dict(name="policy", tool_call=True, limit=dict(context=131072, output=4096))
    provider = dict(npm="@ai-sdk/openai-compatible", name="local", options=options)
    agents = dict(title=dict(disable=True))
    build = dict(prompt="Call bash.", tools={"*": False, "bash": True}) if short else {}
    settings = dict(
        model="local/{model}",
        small_model="local/{model}",
        autoupdate=False,
        share="disabled",
        provider=dict(local=provider | dict(models={"{model}": model})),
        agent=agents | dict(build=build),
    )
    names = ("AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "MODELS_FETCH")
    return dict(
        command=("{programs}/opencode", *(words or ("run", "{task}"))),
        environment=(
            ("OPENCODE_CONFIG_CONTENT", json.dumps(settings)),
            *((f"OPENCODE_DISABLE_{name}", "1") for name in names),
        ),
        programs=(f"{_NODE}/opencode-linux-x64/bin/opencode",),
        memory_mb=4096,
    )


def opencode_acp(short: bool) -> dict:
    """opencode, told its task over the Agent Client Protocol."""
    return opencode(short, "acp") | dict(speaks="acp")


def claude_code(short: bool) -> dict:
    """Anthropic's Claude Code, over the Messages API."""
    brief = ("--system-prompt", "Call Bash.", "--tools", "Bash", "--disable-slash-commands")
    options = ("--dangerously-skip-permissions", "--model", "{model}")
    return dict(
        command=("{programs}/claude", "-p", "{task}", *options, *(brief if short else ())),
        environment=(
            ("ANTHROPIC_BASE_URL", "{root}"),
            ("ANTHROPIC_API_KEY", "{key}"),
            ("ANTHROPIC_SMALL_FAST_MODEL", "{model}"),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ("DISABLE_AUTOUPDATER", "1"),
            ("IS_SANDBOX", "1"),
        ),
        programs=(f"{_NODE}/@anthropic-ai/claude-code-linux-x64/claude",),
        memory_mb=4096,
    )


def aider(short: bool) -> dict:
    """aider, over chats; its model writes the file. Its prompt cannot be shortened."""
    quiet = ("no-check-update", "no-show-model-warnings", "analytics-disable", "no-gitignore")
    options = ("--yes-always", "--no-git", "--no-stream", *(f"--{name}" for name in quiet))
    told = ("--model", "openai/{model}", "--message", "{task}", "{path}")
    return dict(
        command=("{python}", "-m", "aider", *options, *told),
        environment=(
            ("PYTHONPATH", "{programs}/aider/lib/python3.12/site-packages"),
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
            *_OPENAI,
        ),
        programs=("agents/aider",),
    )


AGENTS = dict(
    codex=codex, opencode=opencode, opencode_acp=opencode_acp, claude_code=claude_code, aider=aider
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
        harness=dict(name="command_line", **AGENTS[names[0]](smoke)),
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
        engine=dict(
            slots=2, page=16, prefill_rows=2, prefill_tokens=256, prompt_length=6144, decode_steps=8
        ),
    )
    config.train.update(steps=1, tasks_per_step=1, group_size=2)
    config.train.loss = dict(entropy_coef=0.01)
    config.train.pack = dict(drop_uninformative=False, slots=8192, targets=128, rows=2)
    config.suites = ()
    config.checkpoint = dict(every=1)
