"""The template that came with a tokenizer writes what Hugging Face's libraries would write."""

from __future__ import annotations

import json

import pytest

from models.chat import render, render_tool_results
from models.families import FAMILIES
from models.marks import Marks, unquote
from models.own_template import OwnTemplate, TemplateSettings
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.completion import Completion
from tests.models.test_chat import TALK, TOOL
from tests.models.test_gguf_weights import SMOLLM2, needs_smollm2

# What published templates are made of: blocks on lines of their own, loop controls, tojson with
# arguments, special tokens, refusals, a date, settings, and what the assistant says for training.
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
{{ '<' + message['role'] + '>' }}
    {%- generation %}{{ message['content'] | trim }}</t>{% endgeneration %}

{% endfor %}
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def own(text: str = PUBLISHED, end: str = "</t>", **rest) -> OwnTemplate:
    return OwnTemplate(text, end, bos="<s>", **rest)


def test_a_published_template_is_written_as_it_stands():
    talk = [*TALK, {"role": "assistant", "content": "stop"}]
    whole = "<system>Be brief.</t>\n<user>fix {{ it }}</t>\n<assistant>"
    assert own().render(talk) == f"<s>26{whole}"
    settings = TemplateSettings(date="2031-01-02")
    assert own(settings=settings).render(talk) == f"<s>02{whole}"
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


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].content + 3 }}",
        "{{ 1 // 0 }}{{ messages }}",
        "{{ messages[0]['content'].nothing() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 10 ** 400 / 3.5 }}",
        "{{ strftime_now(3) }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages | map('int') | list | sum | tojson(indent='x', separators=3) }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(text):
    with pytest.raises(ValueError, match="the tokenizer's chat template"):
        own(text).render(TALK)


def test_settings_of_a_template():
    text = "{{ '<think>' if enable_thinking else '<think></think>' }}{{ messages[0].content }}"
    inside, outside = (
        own("{{ messages[0].content }}" + text[: text.index("{{ mess")], settings=settings)
        for settings in (
            TemplateSettings({"enable_thinking": True}),
            TemplateSettings({"enable_thinking": False}),
        )
    )
    assert inside.opens_thought and not outside.opens_thought
    assert outside.render(TALK).endswith("<think></think>")
    with pytest.raises(ValueError, match="chat template has no variable 'enable_thinkin'"):
        own(text, settings=TemplateSettings({"enable_thinkin": True}))
    for wrong in (dict(arguments={"messages": []}), dict(arguments={"bos_token": ""})):
        with pytest.raises(ValueError, match="no setting of a template"):
            TemplateSettings(**wrong)
    with pytest.raises(ValueError, match=r"date = '26\.7\.' must be a day, such as '2024-07-26'"):
        TemplateSettings(date="26.7.")


def test_a_template_for_tools_is_taken_where_there_are_tools():
    template = own("plain", with_tools="{{ tools }}tools")
    assert template.declares_tools
    assert template.render(TALK) == "plain" and template.render(TALK, [TOOL]).endswith("tools")
    assert template.render([*TALK, {"role": "tool", "content": "x"}]) == "Nonetools"


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
    tokenizer.chat_template = "{{ tools }}{{ raise_exception('two') if messages | length > 3 }}"
    with pytest.raises(ValueError, match=r"goes on with '' where|cannot write this: two"):
        chat.for_tokenizer(tokenizer, {"run": TOOL})
    tokenizer.chat_template = None
    tokenizer.template_settings = TemplateSettings({"enable_thinking": False})
    with pytest.raises(ValueError, match=r"no chat template came with .*, to be told enable_th"):
        chat.for_tokenizer(tokenizer, {"run": TOOL})


@needs_smollm2
def test_smollm2s_own_template_is_what_its_family_says():
    tokenizer = Tokenizer.from_gguf(SMOLLM2)
    template = OwnTemplate(tokenizer.chat_template, "<|im_end|>")
    for talk in (TALK, TALK[1:]):
        assert template.render(talk) == render("smollm2", talk)


def test_quoted_marks_stay_quoted_in_json():
    """A template that writes JSON in ASCII keeps the signs of ``models.marks``."""
    marks = Marks(["<s>"])
    text = 'é\\udfff "<s>" \n'
    template = own("{{ messages[0].content | tojson(ensure_ascii=True) }}")
    written = template.render([{"role": "user", "content": marks.quote(text)}])
    assert "<s>" not in written and unquote(written) == json.dumps(text)
    assert Tokenizer.train(["a"], 300, ["<s>"], eos="<s>", pad="<s>").encode(written).count(0) == 0
