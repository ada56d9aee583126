"""Makes golden/deepseek.json: how the published chat template of DeepSeek-V3 writes conversations,
and how the package ``renderers`` reads messages and writes conversations of DeepSeek-R1.

In an environment of its own (made with renderers 0.1.12), with the text of the template, which is
``chat_template`` in the published ``tokenizer_config.json`` of DeepSeek-V3-0324, in a file:

    python -m venv /some/where && /some/where/bin/pip install renderers transformers httpx
    /some/where/bin/python tests/rl_code/environment/make_golden_deepseek.py template.jinja

What is left out: ``renderers`` puts no new line between calls and between results, as the published
template does, and that one does not end results in front of a question.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jinja2
import tokenizers
from renderers.deepseek_r1 import DeepSeekR1Renderer
from renderers.deepseek_v3 import DeepSeekV3Renderer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parent / "golden" / "deepseek.json"
END = "<｜end▁of▁sentence｜>"
BEGIN, CLOSED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALLED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (
    *("<｜begin▁of▁sentence｜>", END, "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *(BEGIN, CLOSED, "<｜tool▁call▁begin｜>", CALLED),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
CALLS = [
    ("write_file", {"path": "s.py", "content": 'x = "<b>"\n\ny = "é```"\n'}),
    ("read_file", {"path": "3", "first_line": 12}),
    ("submit", {}),
]


def called(*calls) -> dict:
    """A message of the assistant that makes calls."""
    made = [{"function": {"name": name, "arguments": value}} for name, value in calls]
    return {"role": "assistant", "content": "I see.", "tool_calls": made}


ASKED = {"role": "user", "content": "fix it"}
RESULTS = [{"role": "tool", "content": text} for text in ("ok\n", "12 é", "")]
SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "So."}
PLAIN = {
    "results": [SYSTEM, SYSTEM, ASKED, called(*CALLS), *RESULTS],
    "answer": [
        ASKED,
        called(*CALLS[:2]),
        *RESULTS[:2],
        called(CALLS[2]),
        RESULTS[2],
        ANSWER,
        ASKED,
    ],
}
THINKING = {
    "results": [SYSTEM, ASKED, called(CALLS[0]), RESULTS[0]],
    "answer": [ASKED, called(CALLS[0]), RESULTS[0], ASKED, ANSWER, ASKED],
}
# Messages as a model may write them.
SAID = [
    f"{BEGIN}{CALL}submit\n```json\n{{}}\n```{CALLED}{CLOSED}",
    f'Two.\n{BEGIN}{CALL}read_file\n```json\n{{"path": "a\\nb```", "first_line": 7}}\n```{CALLED}\n'
    f"{CALL}submit\n```json\n{{}}\n```{CALLED}{CLOSED}",
    "Hello.",
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes and DeepSeek's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def with_texts(talk: list[dict]) -> list[dict]:
    """A conversation whose calls are as the published template takes them."""
    found = json.loads(json.dumps(talk))
    for message in found:
        for one in message.get("tool_calls", ()):
            one["type"] = "function"
            function = one["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def main(path: str) -> None:
    """Writes the file. path: of the published template."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(path).read_text(encoding="utf-8"))
    words = tokenizer()
    plain, thinking = DeepSeekV3Renderer(words), DeepSeekR1Renderer(words)

    def text(ids):
        return words.decode(ids, skip_special_tokens=False)

    read = []
    for said in SAID:
        ids = words.encode(said + END, add_special_tokens=False)
        found = plain.parse_response(ids)
        read.append([said, [[call.name, call.arguments] for call in found.tool_calls]])
    content = {
        "plain": {
            name: [
                talk,
                template.render(
                    messages=with_texts(talk), bos_token=MARKS[0], add_generation_prompt=True
                ),
            ]
            for name, talk in PLAIN.items()
        },
        "thinking": {
            name: [talk, text(thinking.render_ids(talk, add_generation_prompt=True))]
            for name, talk in THINKING.items()
        },
        "read": read,
        "stops": [text([one]) for one in plain.get_stop_token_ids()],
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
