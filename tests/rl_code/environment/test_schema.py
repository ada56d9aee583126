"""Schemas of arguments are read in one way, whoever wrote them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.chat import render
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.tools.schema import TYPES, Arguments, unknown_types
from rl_code.environment.tools.tool import function_schema
from rl_code.harness.endpoint.chat_text import ChatText
from tests.rl_code.harness.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()
COUNT = {
    "$defs": {
        "count": {"type": "integer"},
        "a/b": {"anyOf": [{"type": "boolean"}]},
        "a b": {"type": "array"},
        "empty": {"$anchor": "named", "type": "null"},
    }
}


def arguments(value, **root) -> Arguments:
    return Arguments({"name": "f", "parameters": {"properties": {"x": value}} | root})


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        ({"type": "boolean"}, ("boolean",)),
        ({"type": ["boolean", "null"]}, ("boolean", "null")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("integer", "null")),
        ({"oneOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, ("integer", "null")),
        ({"$ref": "#/$defs/count"}, ("integer",)),
        ({"$ref": "#/$defs/a~1b"}, ("boolean",)),
        ({"allOf": [{"$ref": "#/$defs/count"}], "description": "how many"}, ("integer",)),
        ({"allOf": [{"type": ["number", "string"]}, {"type": "integer"}]}, ("integer",)),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ("object",)),
        ({"anyOf": [{"type": "integer"}, False]}, ("integer",)),
        ({"anyOf": [{"type": "integer"}, True]}, tuple(TYPES)),
        ({"$ref": "#/$defs/a%20b"}, ("array",)),
        ({"$ref": "#named"}, ("null",)),
        ({"$ref": "#unnamed"}, tuple(TYPES)),
        ({"type": "number", "nullable": True}, ("number", "null")),
        ({"type": ["integer", "number"]}, ("number",)),
        ({"enum": ["a", "b", None]}, ("string", "null")),
        ({"const": 3}, ("integer",)),
        ({"$ref": "#"}, tuple(TYPES)),
        ({"$ref": "#/properties/x"}, tuple(TYPES)),
        ({"$ref": "https://example.org/count"}, tuple(TYPES)),
        ({"type": "int"}, tuple(TYPES)),
        ({"type": 5, "anyOf": 3, "enum": "a"}, tuple(TYPES)),
        ({}, tuple(TYPES)),
        (True, tuple(TYPES)),
    ],
)
def test_types_of_arguments(value, kinds):
    assert arguments(value, **COUNT).kinds("x") == kinds


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "12", 12),
        ("integer", " -7\n", -7),
        ("integer", "12.0", 12),
        ("integer", "1e5", 100_000),
        ("integer", "12345678901234567890", 12345678901234567890),
        ("integer", "1.5", "1.5"),
        ("integer", "1e9999", "1e9999"),
        ("integer", "twelve", "twelve"),
        ("number", "12", 12),
        ("number", "1e5", 1e5),
        ("number", ".5", 0.5),
        ("number", "nan", "nan"),
        ("number", "1e999", "1e999"),
        ("boolean", "True", True),
        ("boolean", "yes", "yes"),
        (["boolean", "null"], "false", False),
        (["boolean", "null"], "null", None),
        ("string", "12", "12"),
        ("string", "null", "null"),
        ("array", "[1, 2]", [1, 2]),
        ("object", '{"a": [1e999]}', '{"a": [1e999]}'),
        ("object", '{"a": ' * 5000, '{"a": ' * 5000),
    ],
)
def test_text_has_the_type_that_the_schema_names(kind, text, value):
    read = arguments({"type": kind}).read("x", text)
    assert read == value and type(read) is type(value)


def test_arguments_without_names_have_the_type_of_the_others():
    read = Arguments({"parameters": {"additionalProperties": {"type": "integer"}}})
    assert read.takes("x") and read.read("x", "12") == 12 and not read.accepts("x", "12")
    for nothing in (True, False, None, [], "x"):
        read = Arguments({"parameters": {"additionalProperties": nothing}})
        assert not read.takes("x") and read.read("x", "12") == "12"


def test_a_schema_is_read_through_what_it_is_made_of():
    parts = {
        "$ref": "#/$defs/base",
        "$defs": {"base": {"properties": {"a": {"type": "string"}}, "required": ["a", "gone"]}},
        "anyOf": [
            {"properties": {"b": {"type": "integer"}, "c": {"type": "null"}}, "required": ["b"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
    }
    read = Arguments({"name": "f", "parameters": parts})
    assert sorted(read.properties) == ["a", "b", "c"] and read.required == ("a", "b")
    assert read.kinds("b") == ("integer", "null")
    for nothing in ({}, {"parameters": None}, {"parameters": {"properties": [], "required": 3}}):
        assert Arguments({"name": "f"} | nothing).properties == {}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([*TYPES, "int", "#", "#/anyOf/0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "anyOf", "allOf", "$ref", "properties", "required", "enum"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(anything, st.text(max_size=5))
def test_no_schema_raises(schema, text):
    read = Arguments({"name": "f", "parameters": schema})
    for name in [*read.properties, "x"]:
        assert set(read.kinds(name)) <= set(TYPES)
        read.read(name, text)
        read.accepts(name, text)
    unknown_types(schema)


def test_a_schema_that_branches_at_every_level_is_read_once():
    schema: dict = {"type": "integer"}
    for _ in range(30):
        schema = {"anyOf": [schema, schema], "allOf": [schema, schema]}
    assert arguments(schema).kinds("x") == ("integer",)


def test_own_tools_name_types_that_there_are():
    with pytest.raises(ValueError, match="type 'int' of argument x must be one of string"):
        function_schema("f", "", {"x": {"anyOf": [{"type": "int"}]}}, ())


VALUES = {
    "flag": ({"type": ["boolean", "null"]}, [True, False, None]),
    "count": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [3, 10**12, None]),
    "share": ({"$ref": "#/$defs/share"}, [0.5, 1e-9, 2]),
    "names": ({"type": "array", "items": {"type": "string"}}, [["a", "</parameter>"], []]),
    "text": ({"type": "string"}, ["12", "null", "</parameter>", ""]),
}
SCHEMA = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in VALUES.items()},
        "$defs": {"share": {"type": "number"}},
    },
}
given_arguments = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, (_, values) in VALUES.items()}
)


@given(given_arguments, st.sampled_from([("hermes", "qwen2"), ("qwen3_coder", "qwen3_coder")]))
def test_served_calls_have_the_values_that_were_written(values, words):
    protocol, family = words
    function = {"name": "f", "arguments": values}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    text = render(family, [message], add_generation_prompt=False)
    text = text.partition("assistant\n")[2].rpartition("<|im_end|>")[0]
    read = ChatText(PROTOCOLS[protocol], TOKENIZER).read(TOKENIZER.encode(text), [SCHEMA], "n")
    assert json.loads(read[0].calls[0].arguments) == values
    assert [call.arguments for call in read[1]] == [values]


def test_whole_numbers_are_integers_in_json_too():
    text = '<tool_call>{"name": "f", "arguments": {"count": 12.0, "share": 1.0}}</tool_call>'
    message, _ = ChatText(PROTOCOLS["hermes"], TOKENIZER).read(
        TOKENIZER.encode(text), [SCHEMA], "n"
    )
    assert message.calls[0].arguments == '{"count": 12, "share": 1.0}'
