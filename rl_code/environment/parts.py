"""Prompts and results of tools as tokens, with the documents in them.

A message of a task is a text, or parts of which some are documents:

    {"role": "user", "content": (
        {"type": "text", "text": "Mend the file a.py.\\n"},
        {"type": "document", "text": "def f(): ..."},
    )}

A result of a tool is one whole document where its tool says so (``Tool.documents``).

Protocols know nothing of documents. They write a text in which a mark stands for each document, and
the documents' own texts are put in afterwards. So every protocol and chat template can hold
documents, also those from outside. Each part is tokenised on its own: the tokens of a document do
not depend on what stands beside it. Without the section ``documents`` in the config, a document is
plain text of its message or result, and all is tokenised together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from models.marks import Marks
from models.tokenizer import Tokenizer
from rl_code.environment.documents import OUTSIDE, DocumentsConfig, place
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.tool import Tool
from rl_code.types import Task, ToolResult

# A text, and whether it is a document.
Part = tuple[str, bool]

# Stands for a document while a protocol writes the text around it: a lone surrogate, which no text
# can have that an encoding can carry.
MARK = "\udffe"
_TYPES = ("text", "document")


def prompt_parts(
    protocol: Protocol,
    task: Task,
    tools: Mapping[str, Tool],
    documents: DocumentsConfig | None,
    marks: Marks,
) -> list[Part]:
    """A task's prompt in parts, in order; one plain part if ``documents`` is None.

    marks: those of the tokenizer, which are quoted in all that the task and the tools say. Raises
    ValueError for a message whose parts cannot be read, and for a protocol that leaves out some of
    the documents.
    """
    contents = [
        content_parts(message["content"], f"task {task.id}: messages[{at}]")
        for at, message in enumerate(task.messages)
    ]
    tools = {name: cast(Tool, _Quoted(tool, marks)) for name, tool in tools.items()}
    if documents is None:
        texts = [marks.quote("".join(text for text, _ in parts)) for parts in contents]
        return [(protocol.prompt(_with_texts(protocol, task, texts, marks), tools), False)]
    texts = ["".join(_marked(part, marks) for part in parts) for parts in contents]
    inside = [marks.quote(text) for parts in contents for text, is_document in parts if is_document]
    return put_in(protocol.prompt(_with_texts(protocol, task, texts, marks), tools), inside)


def result_parts(
    protocol: Protocol,
    results: Sequence[ToolResult],
    tools: Mapping[str, Tool],
    documents: DocumentsConfig | None,
    marks: Marks,
    request: str = "",
) -> list[Part]:
    """Results of a message's calls as parts of the observation; one plain part if ``documents`` is
    None or leaves results out.

    marks: those of the tokenizer, which are quoted in what the results and the request say.
    request: text behind the results that asks for another message than calls; "" for none. Raises
    ValueError for a protocol that leaves out some of the documents.
    """
    if documents is None or not documents.results:
        quoted = [
            dataclasses.replace(result, content=marks.quote(result.content)) for result in results
        ]
        return [(_told(protocol, quoted, marks.quote(request)), False)]
    # a call that failed has no document: its result is about the call
    which = [result.ok and tools[result.name].documents for result in results]
    marked = [
        dataclasses.replace(result, content=_marked((result.content, is_document), marks))
        for result, is_document in zip(results, which, strict=True)
    ]
    inside = [
        marks.quote(result.content)
        for result, is_document in zip(results, which, strict=True)
        if is_document
    ]
    return put_in(_told(protocol, marked, marks.quote(request)), inside)


def _told(protocol: Protocol, results: Sequence[ToolResult], request: str) -> str:
    """Text behind a message: its results, and a request where there is one."""
    return protocol.requested(results, request) if request else protocol.observation(results)


def encode(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    documents: DocumentsConfig | None,
    at: int = 0,
    number: int = 0,
) -> tuple[list[int], list[int] | None]:
    """Ids of parts that follow ``at`` places and ``number`` documents of a context, with padding,
    and what each place is; None for that if ``documents`` is None.

    Raises ValueError if the parts end in a document: a message of the policy follows, and its first
    token is predicted from a token that sees everything.
    """
    # what stands outside side by side is tokenised together; a document stands on its own
    merged: list[Part] = []
    for text, is_document in parts:
        if merged and not is_document and not merged[-1][1]:
            merged[-1] = (merged[-1][0] + text, False)
        else:
            merged.append((text, is_document))
    pieces = [(tokenizer.encode(text), is_document) for text, is_document in merged]
    if documents is None:
        return [token for tokens, _ in pieces for token in tokens], None
    tokens, kinds = place(pieces, at, number, documents, tokenizer.pad_id)
    if kinds and kinds[-1] != OUTSIDE:
        raise ValueError(
            f"a text for the policy ends in the document {parts[-1][0][-40:]!r}; something must "
            "stand behind it"
        )
    return tokens, kinds


def content_parts(content: str | Sequence[Mapping[str, Any]], name: str = "content") -> list[Part]:
    """The content of a message in parts.

    name: what messages call it. Raises ValueError for parts that cannot be read.
    """
    if isinstance(content, str):
        return [(content, False)]
    parts = []
    for part in content:
        kind = part.get("type")
        text = part.get("text")
        if kind not in _TYPES or not isinstance(text, str):
            raise ValueError(
                f"{name}: the part {str(part)[:80]} must have a type, one of {', '.join(_TYPES)}, "
                "and a text"
            )
        is_document = kind == "document"
        parts.append((text, is_document))
    return parts


def check_documents(
    protocol: Protocol, tools: Mapping[str, Tool], documents: DocumentsConfig | None
) -> None:
    """Raises ValueError for a protocol whose results cannot hold documents.

    That is one that writes results in another way than they are, as a template does that turns them
    into JSON: a document put in afterwards would then be another text. Or one that writes nothing
    behind a result, from which the next token could be predicted.
    """
    if documents is None or not documents.results:
        return
    for name in [name for name, tool in tools.items() if tool.documents]:
        text = f'{MARK}"a"\n\\{MARK}'
        written = protocol.observation([ToolResult(name, text)])
        if written and (text not in written or written.endswith(text)):
            raise ValueError(
                f"it does not write a result of {name} as it is with something behind it, so the "
                "result cannot be a document; set documents.results=False"
            )


class _Quoted:
    """A tool as prompts declare it: with all texts of its schema quoted."""

    def __init__(self, tool: Tool, marks: Marks):
        self._tool = tool
        self.schema = marks.quote_all(tool.schema)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)


def _with_texts(protocol: Protocol, task: Task, texts: Sequence[str], marks: Marks) -> Task:
    """The task with these contents of its messages, and all else that a prompt says quoted."""
    messages = tuple(
        {
            key: value if key == "role" else marks.quote_all(value)
            for key, value in message.items()
            if key != "content"
        }
        | {"content": text}
        for message, text in zip(task.messages, texts, strict=True)
    )
    prefill = marks.quote(task.prefill) if protocol.continues_file else task.prefill
    return dataclasses.replace(task, messages=messages, prefill=prefill)


def _marked(part: Part, marks: Marks) -> str:
    """Text that a protocol gets in place of a part: the mark for a document, the quoted text for
    any other.
    """
    text, is_document = part
    return MARK if is_document else marks.quote(text)


def put_in(text: str, inside: Sequence[str]) -> list[Part]:
    """The parts of a text in which a ``MARK`` stands for each document; one part where the text has
    none of them. Raises ValueError where it has some of them.
    """
    around = text.split(MARK)
    # a protocol may write nothing of the messages or results, as that of completions
    if len(around) == 1:
        return [(text, False)]
    if len(around) != len(inside) + 1:
        raise ValueError(
            f"the protocol wrote {len(around) - 1} of {len(inside)} documents; each must stand in "
            "its text once"
        )
    parts = [(around[0], False)]
    for document, after in zip(inside, around[1:], strict=True):
        parts += [(document, True), (after, False)]
    return [part for part in parts if part[0]]
