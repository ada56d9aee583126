"""The tokenizer of a run has the chat template that its config chooses."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError, build
from rl_code.run.model import find_tokenizer
from rl_code.run.origin import Origin
from rl_code.run.sections import TokenizerConfig

NAMED = {"tool_use": "{{ tools }}", "rag": "{{ documents }}"}


def folder(path: Path, default: str | None, named: dict[str, str]) -> Path:
    tokenizer = Tokenizer.train(["x"], 300, ["<|pad|>", "<|eot|>"])
    tokenizer.chat_template, tokenizer.named_templates = default, named
    tokenizer.save(path / "tokenizer.json")
    return path


def found(path: Path, **settings) -> Tokenizer:
    spec = build(TokenizerConfig, dict(path=str(path)) | settings, "config.tokenizer")
    config = types.SimpleNamespace(tokenizer=spec)
    return find_tokenizer(config, Origin(), path, lambda index: [])


def test_templates_are_chosen_by_name(tmp_path):
    path = folder(tmp_path, "{{ messages }}", NAMED)
    (tmp_path / "mine.jinja").write_text("mine")
    for chosen, template, named in (
        ("own", "{{ messages }}", NAMED),
        ("own:default", "{{ messages }}", {}),
        ("own:rag", "{{ documents }}", {}),
        ("family", None, {}),
        (str(tmp_path / "mine.jinja"), "mine", {}),
    ):
        tokenizer = found(path, chat_template=chosen)
        assert (tokenizer.chat_template, tokenizer.named_templates) == (template, named)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "the tokenizer has no default; choose one of 'own:rag', 'own:tool_use'"),
        ({"chat_template": "own:chat"}, "the tokenizer has 'own:rag', 'own:tool_use'"),
        ({"chat_template": "nowhere.jinja"}, "neither 'own' nor 'own:NAME' nor 'family' nor a fil"),
        (
            {"chat_template": "own:rag", "template_date": "today"},
            "config.tokenizer.template_date = 'today' must be a day",
        ),
        (
            {"chat_template": "own:rag", "template_arguments": {"messages": ""}},
            "config.tokenizer.template_arguments has 'messages', which is no setting",
        ),
    ],
)
def test_what_cannot_be_chosen_is_named(tmp_path, settings, named):
    with pytest.raises(ConfigError, match=named):
        found(folder(tmp_path, None, NAMED), **settings)


def test_settings_of_templates_come_from_the_config(tmp_path):
    path = folder(tmp_path, "{{ enable_thinking }}", {})
    tokenizer = found(path, template_arguments={"enable_thinking": False})
    assert tokenizer.template_settings.arguments == {"enable_thinking": False}
