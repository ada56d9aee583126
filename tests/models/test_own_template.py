"""The template that came with a tokenizer writes what Hugging Face's libraries would write."""

from __future__ import annotations

import pytest

from models.chat import render, render_tool_results
from models.families import FAMILIES
from models.own_template import OwnTemplate
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.completion import Completion
from tests.models.test_chat import TALK, TOOL
from tests.models.test_gguf_weights import SMOLLM2, needs_smollm2

# What published templates are made of: blocks on lines of their own, loop controls, tojson with
# arguments, special tokens, refusals, and a date where there is a clock.
PUBLISHED = """{{ bos_token }}
{%- if strftime_now is defined %}{{ strftime_now("%d") }}{% endif %}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{% for message in messages %}
    {% if message['role'] == 'robot' %}
        {{- raise_exception('no robots') }}
    {% elif message.content == 'stop' %}
        {% break %}
    {% endif %}
{{ '<' + message['role'] + '>' + message['content'] | trim + '</t>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def own(text: str = PUBLISHED, end: str = "</t>") -> OwnTemplate:
    return OwnTemplate(text, end, bos="<s>")


def test_a_published_template_is_written_as_it_stands():
    talk = [*TALK, {"role": "assistant", "content": "stop"}]
    assert own().render(talk) == ("<s><system>Be brief.</t>\n<user>fix {{ it }}</t>\n<assistant>")
    assert '    "type": "function",' in own().render(TALK, [TOOL])
    assert own().declares_tools and not own("{{ messages }}").declares_tools


def test_what_a_template_refuses_or_cannot_write_is_named():
    with pytest.raises(ValueError, match="cannot write this: no robots"):
        own().render([{"role": "robot", "content": ""}])
    with pytest.raises(ValueError, match="is not valid jinja2"):
        own("{% if %}")
    with pytest.raises(ValueError, match="cannot write this"):
        own("{{ messages.__class__.__mro__ }}").render(TALK)
    with pytest.raises(ValueError, match=r"goes on with '</t>.*should end with '<\|im_end\|>'"):
        own(end="<|im_end|>").render_tool_results(["a"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_template_is_the_same_as_a_tokenizers_own(family):
    template = OwnTemplate(FAMILIES[family].template, FAMILIES[family].end)
    tools = [TOOL] if FAMILIES[family].declares_tools else []
    assert template.render(TALK, tools) == render(family, TALK, tools)
    results = ["a", "<b> é\n"]
    assert template.render_tool_results(results) == render_tool_results(family, results)


def test_protocols_take_the_template_of_the_tokenizer():
    tokenizer = Tokenizer.train(["x"], 300, ["<|pad|>", "<|eot|>", "<|im_end|>", "<|endoftext|>"])
    chat = Chat("qwen2", "json")
    assert chat.for_tokenizer(tokenizer, {"run": TOOL}).own is None
    tokenizer.chat_template = PUBLISHED.replace("</t>", "<|im_end|>")
    assert chat.for_tokenizer(tokenizer, {"run": TOOL}).own.end == "<|im_end|>"
    assert Completion("smollm2").for_tokenizer(tokenizer, {}).own is not None
    assert Completion(None).for_tokenizer(tokenizer, {}) == Completion(None)
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"no place for the tools run; tokenizer\.chat_"):
        chat.for_tokenizer(tokenizer, {"run": TOOL})


@needs_smollm2
def test_smollm2s_own_template_is_what_its_family_says():
    tokenizer = Tokenizer.from_gguf(SMOLLM2)
    template = OwnTemplate(tokenizer.chat_template, "<|im_end|>")
    for talk in (TALK, TALK[1:]):
        assert template.render(talk) == render("smollm2", talk)
