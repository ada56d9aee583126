"""A protocol whose messages also end at texts that a request names."""

from __future__ import annotations

import dataclasses

from rl_code.environment.protocols.protocol import Protocol


@dataclasses.dataclass(frozen=True)
class Stopping(Protocol):
    """Ends a message at its protocol's stop tokens, or behind the first of some texts."""

    texts: tuple[str, ...] = ()

    @classmethod
    def around(cls, protocol: Protocol, texts: tuple[str, ...]) -> Stopping:
        """The protocol with these texts."""
        return cls(stop_tokens=protocol.stop_tokens, verbose=protocol.verbose, texts=texts)

    def stopped(self, text: str) -> bool:
        return any(each in text for each in self.texts)
