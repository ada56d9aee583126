"""All protocols by name."""

from __future__ import annotations

from collections.abc import Mapping

from models.families import FAMILIES
from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.protocols.completion import Completion
from rl_code.environment.protocols.deepseek import DeepSeek
from rl_code.environment.protocols.deepseek_v3_1 import DeepSeek31
from rl_code.environment.protocols.dsml import Dsml
from rl_code.environment.protocols.harmony import Harmony
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.protocols.kimi import Kimi
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.tool import Tool


def _of_family(name: str) -> Protocol:
    """Messages in a family's template, with calls as the family writes them, if it writes any."""
    family = FAMILIES[name]
    if family.call_format is None:
        return Completion(name, stop_tokens=family.ends)
    return Chat(name, family.call_format, stop_tokens=family.ends)


PROTOCOLS: dict[str, Protocol] = {
    # "hermes", "qwen3_coder", "llama3", "completion": where several families share a protocol, it
    # has the template of the first
    **{family.protocol: _of_family(name) for name, family in reversed(FAMILIES.items())},
    # in place of the one that would be made for the family
    "compact": Compact(),
    "compact_thoughts": Compact(thoughts=True),
    "harmony": Harmony(),
    "dsml": Dsml(),
    "kimi_k2": Kimi(),
    "deepseek_v3": DeepSeek(),
    "deepseek_v3_1": DeepSeek31(),
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
