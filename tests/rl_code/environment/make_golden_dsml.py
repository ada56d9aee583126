"""Makes golden/dsml.json: how the published script of DeepSeek-V3.2 writes and reads conversations.

The script is ``encoding/encoding_dsv32.py`` in the model's repository; the package ``sglang`` holds it
too (made with that of sglang 0.5.23), which need not be installed for it:

    pip download --no-deps sglang
    unzip sglang-*.whl sglang/srt/entrypoints/openai/encoding_dsv32.py
    python tests/rl_code/environment/make_golden_dsml.py sglang/srt/entrypoints/openai/encoding_dsv32.py

Its sentences around the functions are not kept: BEFORE and BEHIND stand in their places.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

OUT = Path(__file__).parent / "golden" / "dsml.json"
TEXT = {"type": "string"}
FUNCTIONS = [
    {
        "name": "write_file",
        "description": "Write a file.\nAll of it: é.",
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
                "number": {"type": "integer", "default": 1},
                "share": {"type": "number"},
                "choice": {**TEXT, "enum": ["a", "b"]},
                "list": {"type": "array", "items": TEXT},
                "deep": {"type": "object", "properties": {"s": TEXT, "n": {"type": "integer"}}},
                "none": {"type": ["string", "null"]},
                "either": {"anyOf": [TEXT, {"type": "number"}]},
                "yes": {"type": "boolean"},
                "any": {},
            },
        },
    },
    {"name": "submit", "description": "Done.", "parameters": {"type": "object", "properties": {}}},
]
KINDS = {
    "number": 12,
    "share": -0.5,
    "choice": "b",
    "list": ["x", "é", 'a "b"'],
    "deep": {"s": "<b>\n", "n": 1},
    "none": None,
    "either": "12",
    "yes": True,
    "any": [[], {}, 1e100],
}
CALLS = [
    ("write_file", {"path": "s.py", "content": 'x = "<b>"\n\ny = 1 & "é"\n'}),
    ("many_kinds", KINDS),
    ("submit", {}),
]
THOUGHT = "I see.\nSo be it."
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "fix it"}
RESULTS = [{"role": "tool", "content": text} for text in ("ok\n", "12 é", "")]
LAST = {"role": "assistant", "content": "Fixed.", "reasoning_content": "Done?"}


def called(*names: str) -> dict:
    """A message of the assistant that makes calls of these functions."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for name, value in CALLS
        if name in names
    ]
    return {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": calls}


ALL = called(*(name for name, _ in CALLS))
# Functions are declared where a message of the system stands first.
TALKS = {
    "calls": [SYSTEM, ASKED, ALL, *RESULTS],
    "answer": [
        *(ASKED, called("write_file", "submit"), *RESULTS[:2]),
        *(called("submit"), RESULTS[0], LAST),
    ],
    "said": [ASKED, called("write_file") | {"content": "I write."}, RESULTS[0]],
    "opened": [ASKED],
    "again": [ASKED, {"role": "assistant", "content": "Which?"}, ASKED],
    "unanswered": [ASKED, ASKED],
    "asked behind results": [
        *(ASKED, called("submit") | {"reasoning_content": ""}, RESULTS[0], ASKED),
    ],
}
F, I, P = "<｜DSML｜function_calls>", "<｜DSML｜invoke name", "<｜DSML｜parameter name"
CLOSED = "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
# Messages as a model may write them behind "<think>", without what ends them.
SAID = [
    f'hm</think>\n\n{F}\n{I}="submit">\n{CLOSED}',
    f'</think>Two.\n\n{F}\n{I}="read_file">\n{P}="path" string="true">a "b" </｜DSML｜parameter>\n'
    f'{P}="first_line" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    f'{I}="terminal">\n{P}="command" string="true">ls\n\n</｜DSML｜parameter>\n{CLOSED}',
    f'x</think>\n\n{F}\n{I}="terminal">\n{P}="command" string="true"></｜DSML｜parameter>\n{CLOSED}',
    "x</think>Hello.",
    # no message, it says
    f'hm\n\n{F}\n{I}="submit">\n{CLOSED}',
    f'hm</think>\n\n{F}\n{I}="submit">\n</｜DSML｜invoke>',
    f'hm</think>\n\n{F}\n{I}="submit">\n{CLOSED}\n\nDone.',
    f"hm</think>\n\n{F}\nsubmit\n{CLOSED}",
    f'hm</think>\n\n{F}\n{I}="terminal">\n{P}="command">ls</｜DSML｜parameter>\n{CLOSED}',
    f'hm</think>\n\n{F}\n{I}="terminal">\n{P}="command" string="yes">ls</｜DSML｜parameter>\n{CLOSED}',
    f'hm</think>\n\n{F}\n{I}="terminal">\n{P}="command" string="true">ls\n{CLOSED}',
    f'hm</think>\n\n{F}\n{I}="terminal">\n{P}="command" string="true">a</｜DSML｜parameter>\n'
    f'{P}="command" string="true">b</｜DSML｜parameter>\n{CLOSED}',
    f'hm</think>\n\n{F}\n{I}="terminal">\n{P}="command" string="true">a</｜DSML｜parameter> b\n{CLOSED}',
    "hm",
]


def main(script: str) -> None:
    """Writes the file. script: the path of the published script."""
    spec = importlib.util.spec_from_file_location("encoding_dsv32", script)
    published = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    tools = [{"type": "function", "function": one} for one in FUNCTIONS]
    schemas = "\n".join(json.dumps(one, ensure_ascii=False) for one in FUNCTIONS)
    before, behind = published.render_tools(FUNCTIONS).split(schemas)

    def written(talk, mode):
        first = [talk[0] | {"tools": tools}, *talk[1:]] if talk[0] is SYSTEM else talk
        text = published.encode_messages(first, mode, drop_thinking=False)
        return text.replace(before, "BEFORE\n").replace(behind, "\nBEHIND")

    read = []
    for said in SAID:
        try:
            found = published.parse_message_from_completion_text(
                said + published.eos_token, "thinking"
            )
        except published.DS32EncodingError:
            read.append([said, None])
            continue
        calls = [call["function"] for call in found["tool_calls"]]
        read.append([said, [[one["name"], json.loads(one["arguments"])] for one in calls]])
    content = {
        "functions": FUNCTIONS,
        "talks": {
            name: {"messages": talk} | {mode: written(talk, mode) for mode in ("thinking", "chat")}
            for name, talk in TALKS.items()
        },
        "read": read,
        "stop": published.eos_token,
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
