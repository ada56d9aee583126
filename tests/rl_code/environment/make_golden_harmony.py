"""Makes golden/harmony.json: how the package ``openai-harmony`` writes and reads conversations.

In an environment of its own (made with openai-harmony 0.0.8), with the published file
o200k_base.tiktoken in a folder, which the package else looks for on the network:

    python -m venv /some/where && /some/where/bin/pip install openai-harmony
    TIKTOKEN_ENCODINGS_BASE=/the/folder \
        /some/where/bin/python tests/rl_code/environment/make_golden_harmony.py
"""

from __future__ import annotations

import json
from pathlib import Path

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
    load_harmony_encoding,
)

OUT = Path(__file__).parent / "golden" / "harmony.json"
TEXT = {"type": "string"}
DEEP = {
    "type": "object",
    "properties": {
        "q": {"type": "integer", "description": "Q", "default": 2},
        "r": {"type": "object", "properties": {"s": TEXT}, "required": ["s"]},
    },
}
FUNCTIONS = [
    {
        "name": "write_file",
        "description": "Write a file.\nAll of it.",
        "parameters": {
            "type": "object",
            "properties": {"path": {**TEXT, "description": "where"}, "content": TEXT},
            "required": ["path", "content"],
        },
    },
    {
        "name": "many_kinds",
        "description": "Every kind of argument.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "a\nb", "default": 1},
                "choice": {**TEXT, "enum": ["a", "b"], "default": "a"},
                "text": {**TEXT, "default": "x", "title": "T", "examples": ["e"]},
                "list": {"type": "array", "items": TEXT},
                "anything": {"type": "array"},
                "deep": DEEP,
                "deep_list": {"type": "array", "items": DEEP},
                "none": {"type": ["string", "null"]},
                "nullable": {**TEXT, "nullable": True},
                "either": {"oneOf": [{**TEXT, "description": "s"}, {"type": "number"}]},
                "either_told": {"oneOf": [TEXT, DEEP], "description": "E", "default": "q"},
                "any": {},
                "of_numbers": {"type": "integer", "enum": [1, 2]},
                "any_of": {"anyOf": [TEXT, {"type": "null"}], "description": "A"},
                "yes": {"type": "boolean", "default": True},
            },
            "required": ["number"],
        },
    },
    {"name": "submit", "description": "Done.", "parameters": {"type": "object", "properties": {}}},
    {"name": "look", "description": "Look.", "parameters": None},
]
# Messages as the model may write them, behind "<|start|>assistant".
SAID = [
    "<|channel|>final<|message|>Hello.<|return|>",
    "<|channel|>analysis<|message|>I see.\nSo be it.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.write_file <|constrain|>json<|message|>{"path": "s.py", "content": "é\\n"}<|call|>',
    " to=functions.submit<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    " to=functions.submit<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>commentary<|message|>First I write.<|end|><|start|>assistant to=functions.submit"
    "<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>to=functions.submit {}<|end|><|start|>assistant<|channel|>final"
    "<|message|>No call: to=functions.submit<|return|>",
]


def main() -> None:
    """Writes the file."""
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    keep = RenderConversationConfig(auto_drop_analysis=False)

    def say(role, content):
        return Message.from_role_and_content(role, content)

    tools = [
        ToolDescription.new(one["name"], one["description"], parameters=one["parameters"])
        for one in FUNCTIONS
    ]
    system = SystemContent.new().with_reasoning_effort(ReasoningEffort.HIGH)
    developer = DeveloperContent.new().with_instructions("Be brief.")
    call = say(Role.ASSISTANT, '{"path": "s.py", "content": "é"}').with_channel("commentary")
    result = Message.from_author_and_content(Author.new(Role.TOOL, "functions.write_file"), "ok\n")
    conversation = [
        say(Role.SYSTEM, system.with_conversation_start_date("2025-06-28")),
        say(Role.DEVELOPER, developer.with_function_tools(tools)),
        say(Role.USER, "fix it"),
        say(Role.ASSISTANT, "I see.").with_channel("analysis"),
        call.with_recipient("functions.write_file").with_content_type("<|constrain|>json"),
        result.with_channel("commentary").with_recipient("assistant"),
        say(Role.ASSISTANT, "Fixed.").with_channel("final"),
        say(Role.USER, "and now?"),
    ]
    plain = [say(Role.SYSTEM, SystemContent.new()), say(Role.USER, "hi")]

    def written(messages):
        found = Conversation.from_messages(messages)
        ids = encoding.render_conversation_for_completion(found, Role.ASSISTANT, config=keep)
        return encoding.decode(ids)

    read = []
    for said in SAID:
        ids = encoding.encode(said, allowed_special="all")
        found = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        read.append(
            [said, [[one.channel, one.recipient or "", one.content[0].text] for one in found]]
        )
    content = {
        "functions": FUNCTIONS,
        "conversation": written(conversation),
        "plain": written(plain),
        "read": read,
        "stops": [encoding.decode([one]) for one in encoding.stop_tokens_for_assistant_actions()],
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
