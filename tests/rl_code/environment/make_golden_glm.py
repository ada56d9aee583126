"""Makes golden/glm.json: how the package ``renderers`` writes and reads GLM-4.5's messages.

In an environment of its own (made with renderers 0.1.12):

    python -m venv /some/where && /some/where/bin/pip install renderers
    /some/where/bin/python tests/rl_code/environment/make_golden_glm.py
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from renderers.configs import GLM45RendererConfig
from renderers.glm45 import GLM45Renderer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parent / "golden" / "glm.json"
MARKS = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "/nothink", "<|begin_of_image|>", "<|end_of_image|>"),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in (
        ("write_file", {"path": {"type": "string"}, "content": {"type": "string"}}),
        ("read_file", {"path": {"type": "string"}, "first_line": {"type": "integer"}}),
        ("submit", {}),
    )
]
CALLS = [
    ("write_file", {"path": "s.py", "content": 'x = "<b>"\n\ny = 1\n'}),
    ("read_file", {"path": "3", "first_line": 12}),
    ("submit", {}),
]
THOUGHT = "I see.\nSo be it."
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "fix it"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": THOUGHT,
        "tool_calls": [{"function": {"name": name, "arguments": args}} for name, args in CALLS],
    },
    {"role": "tool", "content": "ok\n"},
    {"role": "tool", "content": "12 é"},
]
# Messages as a model may write them. Left out is what this project reads in another way: ``renderers``
# takes calls inside of thoughts, and cuts white space off the ends of texts.
SAID = [
    "\n<think></think>\n<tool_call>submit\n</tool_call>",
    "\n<think>hm</think><tool_call>read_file<arg_key>path</arg_key><arg_value>a b</arg_value>"
    "<arg_key>first_line</arg_key><arg_value>7</arg_value></tool_call>",
    "\n<think>hm</think>\nTwo.\n<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a"
    "</arg_value>\n<arg_key>content</arg_key>\n<arg_value>b\n\nc</arg_value>\n</tool_call>\n"
    "<tool_call>submit\n</tool_call>",
    "\n<think></think>\nHello.",
]
BEHIND = {
    "results": TALK[3:],
    "question": [{"role": "user", "content": "and now?"}],
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes and GLM's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def main() -> None:
    """Writes the file."""
    words = tokenizer()
    # earlier thoughts stay, as they do here
    renderer = GLM45Renderer(words, GLM45RendererConfig(thinking_retention="all"))

    def text(ids):
        return words.decode(ids, skip_special_tokens=False)

    def ids(said):
        return words.encode(said, add_special_tokens=False)

    prompt = renderer.render_ids(TALK[:2], add_generation_prompt=True)
    behind = {}
    for name, messages in BEHIND.items():
        for last in ("<|observation|>", "<|user|>"):
            sampled = ids(SAID[0]) + ids(last)
            whole = renderer.bridge_to_next_turn(prompt, sampled, messages, tools=TOOLS)
            behind[f"{name} {last}"] = text(whole.token_ids[len(prompt) + len(sampled) :])
    read = []
    for said in SAID:
        found = renderer.parse_response([*ids(said), words.eos_token_id], tools=TOOLS)
        read.append([said, [[call.name, call.arguments] for call in found.tool_calls]])
    content = {
        "calls": CALLS,
        "conversation": text(renderer.render_ids(TALK, add_generation_prompt=True)),
        "behind": behind,
        "read": read,
        "stops": [text([one]) for one in renderer.get_stop_token_ids()],
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
