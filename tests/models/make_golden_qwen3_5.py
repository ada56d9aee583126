"""Makes golden_chat/qwen3_5.json: how the package ``renderers`` writes conversations of Qwen3.5.

In an environment of its own (made with renderers 0.1.12):

    python -m venv /some/where && /some/where/bin/pip install renderers transformers httpx
    /some/where/bin/python tests/models/make_golden_qwen3_5.py

What is left out: the sentences around declared functions, which are this project's, white space
around results, which ``renderers`` takes away, and thoughts.
``renderers`` opens the assistant's turn inside of a thought, the template here does not.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from renderers.configs import Qwen35RendererConfig
from renderers.qwen35 import Qwen35Renderer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parent / "golden_chat" / "qwen3_5.json"
MARKS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
OPENED = "<think>\n"
CALLS = [
    ("write_file", {"path": "s.py", "content": 'x = "<b>"\n\ny = "é"\n'}),
    ("read_file", {"path": "3", "first_line": 12}),
    ("submit", {}),
]


def called(content: str, *calls) -> dict:
    """A message of the assistant that makes calls."""
    made = [{"function": {"name": name, "arguments": value}} for name, value in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


ASKED = {"role": "user", "content": "  fix it\n"}
RESULTS = [{"role": "tool", "content": text} for text in ("ok", "12 é", "")]
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "So.\n"}
# each ends with a question, before which no thought stays
TALKS = {
    "calls": [SYSTEM, ASKED, called("I see.", *CALLS), *RESULTS, ANSWER, ASKED],
    "without words": [ASKED, called("", *CALLS[:2]), *RESULTS[:2], ANSWER, ASKED],
    "one call": [ASKED, called("Now.\n", CALLS[2]), RESULTS[2], ASKED],
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes and Qwen's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def main() -> None:
    """Writes the file."""
    words = tokenizer()
    renderer = Qwen35Renderer(words, Qwen35RendererConfig(enable_thinking=True))

    def text(talk: list[dict]) -> str:
        ids = renderer.render_ids(talk, add_generation_prompt=True)
        return words.decode(ids, skip_special_tokens=False).removesuffix(OPENED)

    content = {name: [talk, text(talk)] for name, talk in TALKS.items()}
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
