"""All protocols by name."""

from __future__ import annotations

from collections.abc import Mapping

from rl_code import named
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.protocols.completion import Completion
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.tool import Tool
from rl_code.named import Named
from rl_code.read_config import ConfigError

# Another family's chat needs no entry: a config may say
# dict(name="rl_code.environment.protocols.chat:Chat", family=..., calls=...).
PROTOCOLS: dict[str, Protocol] = {
    "compact": Compact(),
    "compact_thoughts": Compact(thoughts=True),
    "hermes": Chat("qwen2", "json"),
    "qwen3_coder": Chat("qwen3_coder", "tags"),
    "llama3": Chat("llama3", "bare", stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    "completion": Completion("smollm2"),
    "raw_completion": Completion(None),
    "infill": Infill(),
}


def find_protocol(config: Named, tools: Mapping[str, Tool], path: str) -> Protocol:
    """The protocol that a config names, with its settings.

    path: dotted key of the config, for messages.

    Raises:
      ConfigError: no such protocol, or one that cannot write calls of these tools.
    """
    protocol = named.make(PROTOCOLS, config, path)
    if not isinstance(protocol, Protocol):
        kind = "rl_code.environment.protocols.protocol.Protocol"
        raise ConfigError(f"{path} = {config.name!r}: {protocol!r} is no {kind}")
    try:
        protocol.check_tools(tools)
    except ValueError as error:
        raise ConfigError(f"{path} = {config.name!r}: {error}") from error
    return protocol
