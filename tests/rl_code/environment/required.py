"""Checks of the grammars of messages that must call a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from models.tokenizer import Tokenizer
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.tool import Tool
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.types import Task


def check_required(
    protocol: Protocol,
    tokenizer: Tokenizer,
    tools: Mapping[str, Tool],
    task: Task,
    cases: Sequence[tuple[str, bool, bool]],
    end: str,
    content: tuple[str, str] = ("", ""),
) -> None:
    """Each message is allowed where it is said to be, may end there, and is read without an error.

    cases: messages, and whether each is allowed where there may be several calls and where there
    may be one. The functions submit and read_file may be called. end: the token of an end.
    content: a schema, and JSON that has it and may stand in place of calls.
    """
    schema, instead = content
    grammars = ChatText(protocol, tokenizer).grammars
    functions = [tools["submit"].schema, tools["read_file"].schema]
    for many in (True, False):
        grammar = protocol.grammar(functions, grammars.special, many=many, content=schema)
        for said, *allowed in (*cases, *([(instead, True, True)] if schema else [])):
            ids = tokenizer.encode(said)
            (answer,) = grammars.start(grammar, 1)
            assert (answer.read(ids) == len(ids)) == allowed[not many], (said, many)
            if allowed[not many] and said != instead:
                assert answer.allowed()[tokenizer.token_id(end)]
                assert not any(one.error for one in protocol.parse(said, task, tools))
