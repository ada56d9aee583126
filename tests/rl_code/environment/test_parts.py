"""Documents in prompts and answers: every protocol can hold them, and says what it said before."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.marks import Marks
from models.own_template import OwnTemplate
from rl_code.config.named import Named
from rl_code.environment.asked import Asked
from rl_code.environment.documents import OUTSIDE, PADDING, DocumentsConfig
from rl_code.environment.episode import Episode
from rl_code.environment.parts import (
    check_documents,
    content_parts,
    encode,
    prompt_parts,
    result_parts,
)
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.completion import Completion
from rl_code.environment.tools.api import TOOLS as TOOLS_BY_NAME
from rl_code.environment.tools.api import find_tools
from rl_code.types import Limits, ToolResult
from tests.rl_code.signals import rewarder

TOOLS = find_tools()
CONFIG = dataclasses.replace(DocumentsConfig(longest=64, shortest=4), page=8)
FILE = "def g(y):\n    return y + 1 # <|eot|>\n"
MARKS = Marks(PROTOCOLS["compact"].SPECIAL_TOKENS)
QUOTED = MARKS.quote(FILE)
READ = ToolResult("read_file", FILE)
PARTS = (
    {"type": "text", "text": "double each number\nb.py:\n"},
    {"type": "document", "text": FILE},
    {"type": "text", "text": "c.py:\n"},
    {"type": "document", "text": "x = 1\ny = 2\n"},
    {"type": "text", "text": "f([1]) == [2]"},
)


@pytest.fixture
def asking(task):
    """A task whose prompt shows two files."""
    return dataclasses.replace(task, messages=({"role": "user", "content": PARTS},))


# the prompt of infill is a file with a hole, without messages
@pytest.mark.parametrize("name", sorted(PROTOCOLS.keys() - {"infill"}))
def test_prompts_and_answers_say_the_same_with_documents_as_without(name, asking):
    protocol = PROTOCOLS[name]
    silent = isinstance(protocol, Completion)
    tools = {} if silent else TOOLS
    (plain, _), *others = prompt_parts(protocol, asking, tools, None, MARKS)
    parts = prompt_parts(protocol, asking, tools, CONFIG, MARKS)
    assert not others and "".join(text for text, _ in parts) == plain
    shown = [text for text, is_document in parts if is_document]
    # the protocol without a template writes no messages at all
    assert shown == ([] if name == "raw_completion" else [QUOTED, "x = 1\ny = 2\n"])

    results = [ToolResult("write_file", "ok"), READ, ToolResult("read_file", "no file", ok=False)]
    ((plain, _),) = result_parts(protocol, results, TOOLS, None, MARKS)
    parts = result_parts(protocol, results, TOOLS, CONFIG, MARKS)
    assert "".join(text for text, _ in parts) == plain
    assert [text for text, is_document in parts if is_document] == ([] if silent else [QUOTED])
    only_prompts = dataclasses.replace(CONFIG, results=False)
    assert result_parts(protocol, results, TOOLS, only_prompts, MARKS) == [(plain, False)]
    check_documents(protocol, TOOLS, CONFIG)


def test_what_searches_found_is_a_document_as_a_file_is():
    # the tools of an MCP server are those that it lists
    tools = find_tools(tuple(Named(name) for name in TOOLS_BY_NAME if name != "mcp"))
    found = [ToolResult(name, f"{name} found this") for name in tools]
    parts = result_parts(PROTOCOLS["compact"], found, tools, CONFIG, MARKS)
    shown = {text.split()[0] for text, is_document in parts if is_document}
    assert shown == {"read_file", "grep", "jump", "semantic_search"}


@given(st.lists(st.text(st.sampled_from("ab\ufdd0\udffe\n<|")), min_size=1, max_size=3))
def test_no_text_can_stand_for_a_document(texts):
    results = [ToolResult("terminal", text) for text in texts]
    parts = result_parts(PROTOCOLS["compact"], [*results, READ], TOOLS, CONFIG, MARKS)
    assert [text for text, is_document in parts if is_document] == [QUOTED]


def test_a_document_has_the_same_tokens_wherever_it_stands(asking, tokenizer, pool):
    limits = Limits(turns=4, tokens=600, turn_tokens=120, test_runs=0, command_s=5.0)
    task = dataclasses.replace(asking, files={**asking.files, "b.py": FILE})
    episode = Episode(
        task,
        group=0,
        index=0,
        protocol=PROTOCOLS["compact"],
        tools=TOOLS,
        tokenizer=tokenizer,
        pool=pool,
        limits=limits,
        reward=rewarder(),
        asked=Asked(documents=CONFIG),
    )
    prompt = episode.start()
    assert len(episode.documents) == len(prompt)
    message = tokenizer.encode("<|call|>read b.py<|end|><|call|>read nothing<|end|>")
    cut = [-0.5] * len(message), [0] * len(message)
    answer = episode.step(message, *cut)  # without its stop token, as a message that was cut
    assert answer is not None
    submit = tokenizer.encode("<|call|>submit<|end|><|eot|>")
    assert episode.step(submit, [-0.5] * len(submit), [0] * len(submit)) is None
    trajectory = episode.finish()
    (context,) = trajectory.contexts
    assert context.tokens.tolist() == prompt + message + answer + submit
    kinds = context.documents
    assert kinds.max() == 3 and (kinds[context.sampled] == OUTSIDE).all()
    first, again = (context.tokens[kinds == number].tolist() for number in (1, 3))
    assert first == again == tokenizer.encode(QUOTED)
    for number in (1, 2, 3):
        places = np.flatnonzero(kinds == number)
        assert places[0] % CONFIG.page == 0
        assert set(kinds[places[-1] + 1 : -(-(places[-1] + 1) // 8) * 8]) <= {PADDING}
    assert (context.tokens[kinds == PADDING] == tokenizer.pad_id).all()
    # what people read has no padding, and the error stands outside of the document
    told = trajectory.turns[2].text
    assert told.startswith(f"<|eot|><|tool|>{FILE}\nno file nothing") and "<|pad|>" not in told
    plain = tokenizer.decode([t for t, kind in zip(prompt, kinds, strict=False) if kind != PADDING])
    assert trajectory.turns[0].text == plain


def test_documents_change_nothing_where_the_run_has_none(task, tokenizer):
    parts = prompt_parts(PROTOCOLS["compact"], task, TOOLS, None, MARKS)
    text = PROTOCOLS["compact"].prompt(task, TOOLS)
    assert encode(parts, tokenizer, None) == (tokenizer.encode(text), None)


def test_what_cannot_be_is_refused_in_words(asking, tokenizer):
    with pytest.raises(ValueError, match=r"task double/0: messages\[0\]: the part .*image"):
        prompt_parts(
            PROTOCOLS["compact"],
            dataclasses.replace(
                asking, messages=({"role": "user", "content": [{"type": "image", "text": ""}]},)
            ),
            TOOLS,
            CONFIG,
            MARKS,
        )
    with pytest.raises(ValueError, match="ends in the document"):
        encode([("go", False), (FILE, True)], tokenizer, CONFIG)
    shown = "(m.content | tojson if m.role == 'tool' else m.content)"
    turns = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ " + shown + " ~ '</t>' }}{% endfor %}"
    own = OwnTemplate(turns + "{{ '<assistant>' }}", "</t>")
    with pytest.raises(ValueError, match=r"set documents\.results=False"):
        check_documents(Chat("qwen2", "json", own=own), TOOLS, CONFIG)
    assert content_parts("text") == [("text", False)]
