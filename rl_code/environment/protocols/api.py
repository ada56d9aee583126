"""All protocols by name."""

from __future__ import annotations

from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.protocols.completion import Completion
from rl_code.environment.protocols.protocol import Protocol

PROTOCOLS: dict[str, Protocol] = {
    "compact": Compact(),
    "hermes": Chat("qwen2", "json"),
    "qwen3_coder": Chat("qwen3_coder", "tags"),
    "llama3": Chat("llama3", "bare", stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    "completion": Completion("smollm2"),
    "raw_completion": Completion(None),
}
