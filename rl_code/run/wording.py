"""Tasks of a run as tokens: by its protocols, its tools and its tokenizer."""

from __future__ import annotations

from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.parts import check_documents, encode, prompt_parts
from rl_code.environment.prompts import Encoded, Prompts
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.protocols.protocol import Protocol, stop_ids
from rl_code.environment.tools.api import offered
from rl_code.environment.tools.tool import Tool
from rl_code.run.config import RunConfig
from rl_code.types import Task


class Wording:
    """Protocols and prompts. Where a protocol is asked for, None is that of training; a suite may
    have another. Raises ConfigError for one that does not go with the tokenizer.
    """

    def __init__(self, config: RunConfig, tools: dict[str, Tool], tokenizer: Tokenizer):
        self._config, self._tools, self._tokenizer = config, tools, tokenizer
        self._prompts = Prompts(self._encode)

    def protocol(self, named: Named | None = None) -> Protocol:
        """The protocol, with the tokenizer's template."""
        named = named or self._config.protocol
        found = find_protocol(named, self._tools, "config.protocol")
        try:
            found = found.for_tokenizer(self._tokenizer, self._tools)
            check_documents(found, self._tools, self._config.documents)
            return found
        except ValueError as error:
            raise ConfigError(f"config.protocol = {named.name!r}: {error}") from error

    def stop_ids(self, named: Named | None = None) -> frozenset[int]:
        """Ids of the tokens that end a message."""
        found = self.protocol(named)
        try:
            return stop_ids(found, self._tokenizer)
        except ValueError as error:
            named = named or self._config.protocol
            raise ConfigError(f"config.protocol = {named.name!r}: {error}") from error

    def encoded(self, task: Task, named: Named | None = None) -> Encoded:
        """The prompt of a task, which is kept."""
        return self._prompts(task, named or self._config.protocol)

    def prompt(self, task: Task, named: Named | None = None) -> list[int]:
        """Ids of a task's prompt."""
        return self.encoded(task, named)[0]

    def prompt_anew(self, task: Task) -> list[int]:
        """As ``prompt``, of a task that is not asked for again."""
        return self._encode(task, self._config.protocol)[0]

    def _encode(self, task: Task, named: Named) -> Encoded:
        documents = self._config.documents
        tools = offered(task, self._tools)
        parts = prompt_parts(self.protocol(named), task, tools, documents, self._tokenizer.marks)
        return encode(parts, self._tokenizer, documents)
