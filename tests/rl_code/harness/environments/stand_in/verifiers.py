"""As much of the package verifiers as the driver calls, for tests where it is not installed.

Its one environment asks for a sum, and says after each wrong number whether the sum is more or less.
"""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request

__version__ = "0.0"
sys.modules["verifiers.types"] = sys.modules["verifiers.errors"] = sys.modules[__name__]


class InfraError(Exception):
    pass


class SandboxError(InfraError):
    pass


class ClientConfig:
    def __init__(self, api_key_var, api_base_url, **settings):
        self.key_variable, self.url = api_key_var, api_base_url


class Sums:
    pass_threshold = 0.5

    def __init__(self, rows=3, held_out=0, group=False, does="play"):
        self.requires_group_rollouts = group
        self.sets = [
            [
                {"example_id": n, "answer": str(2 * n + 1), "prompt": f"{n} + {n + 1} = ?"}
                for n in range(count)
            ]
            for count in (rows, held_out)
        ]
        self.does = does

    def build_dataset(self):
        return self.sets[0]

    def build_eval_dataset(self):
        return self.sets[1] or None

    async def run_rollout(self, row, client, model, sampling_args):
        return await asyncio.to_thread(self.play, row, client, model)

    def play(self, row, client, model):
        messages = [{"role": "user", "content": row["prompt"]}]
        print("a line that is none of the driver's", flush=True)
        said = ""
        while said != row["answer"]:
            body = json.dumps({"model": model, "messages": messages}).encode()
            headers = {"Content-Type": "application/json"}
            headers["Authorization"] = f"Bearer {os.environ[client.key_variable]}"
            request = urllib.request.Request(f"{client.url}/chat/completions", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    said = json.load(answer)["choices"][0]["message"]["content"]
            except urllib.error.HTTPError as error:
                if json.load(error)["error"]["code"] != "context_length_exceeded":
                    raise
                break
            if self.does == "exit":
                os._exit(1)
            if self.does == "raise":
                raise KeyError("its own bug")
            said = said.strip()
            less = said.isdecimal() and int(said) < int(row["answer"])
            word = "more" if less else "less"
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": word})
        reward = 1.0 if said == row["answer"] else 0.25
        error = {"error": self.does, "error_chain_repr": self.does}
        return {
            "reward": float("nan") if self.does == "no number" else reward,
            "metrics": {"guesses": float(len(messages) // 2)},
            "error": error if self.does.endswith("Error") else None,
        }


def load_environment(env_id, **args):
    if env_id != "sums":
        raise ValueError(f"Could not import {env_id!r}")
    return Sums(**args)
