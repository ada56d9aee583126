"""Makes golden/kimi.json: how the package ``renderers`` writes and reads messages of Kimi K2.

It has no Kimi-K2-Thinking. Conversations with thoughts are those of its Kimi K2.5, whose turns are
the same, without the mark of a thought with which K2.5 opens the next message.

In an environment of its own (made with renderers 0.1.12):

    python -m venv /some/where && /some/where/bin/pip install renderers transformers httpx
    /some/where/bin/python tests/rl_code/environment/make_golden_kimi.py
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from renderers.kimi_k2 import KimiK2Renderer
from renderers.kimi_k25 import KimiK25Renderer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parent / "golden" / "kimi.json"
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALLED = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKS = (
    *("[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    *(BEGIN, END, CALL, ARGUMENTS, CALLED),
    # of pictures, for which K2.5's renderer asks
    *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
)
TEXT = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Of {name}: é.",
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }
    for name, properties in (
        ("write_file", {"path": TEXT, "content": {**TEXT, "description": "All of\nit."}}),
        ("read_file", {"path": TEXT, "first_line": {"type": "integer", "default": 1}}),
        ("submit", {}),
    )
]
CALLS = [
    ("write_file", {"path": "s.py", "content": 'x = "<b>"\n\ny = "é"\n'}),
    ("read_file", {"path": "3", "first_line": 12}),
    ("submit", {}),
]


def called(first: int, *calls) -> dict:
    """A message of the assistant that makes calls. first: the number of the first."""
    made = [
        {"id": f"functions.{name}:{at}", "function": {"name": name, "arguments": value}}
        for at, (name, value) in enumerate(calls, start=first)
    ]
    return {"role": "assistant", "content": "I see.", "tool_calls": made}


def result(number: int, name: str, content: str) -> dict:
    """A result of a call."""
    return {
        "role": "tool",
        "name": name,
        "tool_call_id": f"functions.{name}:{number}",
        "content": content,
    }


ASKED = {"role": "user", "content": "fix it"}
RESULTS = [result(0, "write_file", "ok\n"), result(1, "read_file", "12 é"), result(2, "submit", "")]
TALKS = {
    "whole": [
        *({"role": "system", "content": "Be brief."}, ASKED, called(0, *CALLS), *RESULTS),
        *(
            called(3, CALLS[1]),
            result(3, "read_file", "13"),
            {"role": "assistant", "content": "So."},
        ),
        {"role": "user", "content": "and now?"},
    ],
    "without a system": [ASKED],
}
# Thoughts of all turns behind the last answer stay in published templates, those before it do not.
THOUGHTS = [
    *({"role": "system", "content": "Be brief."}, ASKED, called(0, CALLS[0]), RESULTS[0]),
    *({"role": "assistant", "content": "So."}, {"role": "user", "content": "and now?"}),
    called(1, CALLS[1]) | {"reasoning_content": "Line\n12."},
    *(RESULTS[1], called(2, CALLS[2]), RESULTS[2]),
]
# Messages as a model may write them.
SAID = [
    f"{BEGIN}{CALL}functions.submit:0{ARGUMENTS}{{}}{CALLED}{END}",
    f'Two.\n{BEGIN}{CALL}functions.read_file:4{ARGUMENTS}{{"path": "a\\nb", "first_line": 7}}{CALLED}'
    f"{CALL}functions.submit:5{ARGUMENTS}{{}}{CALLED}{END}",
    f"\n{BEGIN}\n{CALL} submit:7 {ARGUMENTS}\n{{}}\n{CALLED}\n{END}\n",
    "Hello.",
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes and Kimi's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]")


def main() -> None:
    """Writes the file."""
    words = tokenizer()
    renderer = KimiK2Renderer(words)

    def text(ids):
        return words.decode(ids, skip_special_tokens=False)

    def ids(said):
        return words.encode(said, add_special_tokens=False)

    thinking = KimiK25Renderer(words)
    thoughts = text(thinking.render_ids(THOUGHTS, add_generation_prompt=True))
    assert thoughts.endswith("<|im_middle|><think>")
    prompt = renderer.render_ids([ASKED], add_generation_prompt=True)
    sampled = ids(SAID[0] + "<|im_end|>")
    behind = {}
    for name, messages in (("results", RESULTS[:2]), ("question", [ASKED])):
        whole = renderer.bridge_to_next_turn(prompt, sampled, messages)
        behind[name] = text(whole.token_ids[len(prompt) + len(sampled) :])
    read = []
    for said in SAID:
        found = renderer.parse_response(ids(said + "<|im_end|>"))
        read.append([said, [[call.name, call.arguments] for call in found.tool_calls]])
    content = {
        "tools": TOOLS,
        "talks": {
            name: {
                "messages": talk,
                "text": text(renderer.render_ids(talk, tools=TOOLS, add_generation_prompt=True)),
            }
            for name, talk in TALKS.items()
        },
        "thoughts": {"messages": THOUGHTS, "text": thoughts.removesuffix("<think>")},
        "behind": behind,
        "read": read,
        "stops": [text([one]) for one in renderer.get_stop_token_ids()],
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
