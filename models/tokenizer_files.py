"""Files beside a ``tokenizer.json`` in a Hugging Face folder: special tokens and chat templates.

Some tokens stand only in ``tokenizer_config.json``. Hugging Face's libraries add them when they
read a tokenizer, and so does ``add_tokens``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from models.json_files import read_json, write_json

CONFIG_FILE = "tokenizer_config.json"
# Files of a model that name tokens by their ids.
_MODEL_FILES = ("generation_config.json", "config.json")
_SPECIAL_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATES_FOLDER = "additional_chat_templates"
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTED = ("additional_special_tokens", "extra_special_tokens")
# Settings of a token, as tokenizer_config.json has them.
_SETTINGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# A class that reads tokenizer.json as it stands, for those who would take another.
_CLASS_MODULE = "tokenization_as_written"
_CLASS = "AsWritten"
_CLASS_CODE = f'''"""The tokenizer of this folder, as tokenizer.json says."""

from transformers import PreTrainedTokenizerFast


class {_CLASS}(PreTrainedTokenizerFast):
    """Reads tokenizer.json alone."""
'''


@dataclasses.dataclass(frozen=True)
class Beside:
    """Contents of the files in a folder."""

    folder: Path
    # The content of tokenizer_config.json, and special tokens of special_tokens_map.json that it
    # lacks.
    config: Mapping[str, Any]

    def token(self, name: str) -> str | None:
        """Text of a token by its role, such as "eos_token"."""
        return _text(self.config.get(name))

    def end_id(self) -> int | None:
        """Id of the token that ends a turn by the files of a model that are beside the tokenizer;
        None where they do not say it. Of several it is the first.
        """
        for name in _MODEL_FILES:
            path = self.folder / name
            content = read_json(path) if path.is_file() else {}
            for place in (content, content.get("text_config")):
                found = place.get("eos_token_id") if isinstance(place, Mapping) else None
                found = found[0] if isinstance(found, list) and found else found
                if type(found) is int:
                    return found
        return None

    def templates(self) -> dict[str, str]:
        """Chat templates by name; "default" is the one without a name.

        Raises ValueError for what is no template.
        """
        found = self.config.get("chat_template")
        if isinstance(found, str):
            found = {"default": found}
        elif isinstance(found, list):
            try:
                found = {entry["name"]: entry["template"] for entry in found}
            except (TypeError, KeyError) as error:
                raise ValueError(
                    f"{self.folder / CONFIG_FILE}: chat_template is neither a text nor a list of "
                    '{"name": ..., "template": ...}'
                ) from error
        templates = dict(found) if isinstance(found, Mapping) else {}
        alone = self.folder / _TEMPLATE_FILE
        if alone.exists():
            templates["default"] = alone.read_text(encoding="utf-8")
        for path in sorted((self.folder / _TEMPLATES_FOLDER).glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        for name, text in templates.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise ValueError(f"{self.folder}: the chat template {name!r} is no text")
        return templates


def read_beside(folder: Path) -> Beside:
    """Contents of the files in a folder; nothing where there are none. Raises ValueError for files
    that are no JSON objects.
    """
    config, special = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in (CONFIG_FILE, _SPECIAL_FILE)
    )
    more = {name: value for name, value in special.items() if name in (*_NAMED, *_LISTED)}
    return Beside(folder, more | config)


def write_beside(
    folder: Path,
    special: Mapping[str, str],
    default: str | None,
    named: Mapping[str, str],
    own_class: bool,
) -> None:
    """Writes the files that ``read_beside`` reads.

    special: texts of special tokens by their roles. default: the chat template without a name, if
    any. named: those with names. own_class: whether transformers needs a class that reads
    tokenizer.json as it stands.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # decoding gives the text back unchanged
        **special,
    }
    if own_class:
        (folder / f"{_CLASS_MODULE}.py").write_text(_CLASS_CODE, encoding="utf-8")
        config["auto_map"] = {"AutoTokenizer": [None, f"{_CLASS_MODULE}.{_CLASS}"]}
    for name, content in ((CONFIG_FILE, config), (_SPECIAL_FILE, special)):
        write_json(folder / name, content)
    if default is not None:
        (folder / _TEMPLATE_FILE).write_text(default, encoding="utf-8")
    for name, text in named.items():
        if Path(name).name != name:
            raise ValueError(f"the name of a chat template, {name!r}, cannot be that of a file")
        path = folder / _TEMPLATES_FOLDER / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def add_tokens(backend: tokenizers.Tokenizer, beside: Beside) -> None:
    """Adds the tokens to a tokenizer that only the files beside it name, with their ids. A token of
    the vocabulary that they call special becomes special.

    Raises ValueError for a token whose id is neither in the vocabulary nor the next free one.
    """
    for id, token in _with_ids(beside):
        known = backend.get_added_tokens_decoder().get(backend.token_to_id(token.content))
        if known is not None and (known.special or not token.special):
            continue
        free = known is None and backend.token_to_id(token.content) is None
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if free and backend.token_to_id(token.content) != id:
            raise ValueError(
                f"{beside.folder / CONFIG_FILE} gives {token.content!r} the id {id}, and the next "
                f"free one of tokenizer.json is {backend.token_to_id(token.content)}"
            )
    for text in _special(beside.config):
        id = backend.token_to_id(text)
        known = backend.get_added_tokens_decoder().get(id)
        if id is not None and (known is None or not known.special):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _with_ids(beside: Beside) -> list[tuple[int, AddedToken]]:
    """The tokens of ``added_tokens_decoder`` in the order of their ids."""
    listed = beside.config.get("added_tokens_decoder") or {}
    try:
        found = [
            (
                int(id),
                AddedToken(
                    token["content"],
                    **{name: bool(token[name]) for name in _SETTINGS if name in token},
                ),
            )
            for id, token in listed.items()
        ]
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{beside.folder / CONFIG_FILE}: added_tokens_decoder does not map ids to tokens"
        ) from error
    return sorted(found, key=lambda one: one[0])


def _special(config: Mapping[str, Any]) -> Iterator[str]:
    """Texts of all special tokens that a config names."""
    values = [config.get(name) for name in _NAMED]
    for name in _LISTED:
        listed = config.get(name)
        if isinstance(listed, Mapping):
            values += listed.values()
        elif isinstance(listed, list):
            values += listed
    yield from filter(None, map(_text, values))


def _text(token: Any) -> str | None:
    """A token of a config, which is a text or an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
