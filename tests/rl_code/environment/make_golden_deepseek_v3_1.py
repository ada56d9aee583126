"""Makes golden/deepseek_v3_1.json: how the published chat templates of DeepSeek-V3.1 and
V3.1-Terminus write conversations. The package ``renderers`` (0.1.12) has neither.

With the texts of the templates, which are ``chat_template.jinja`` or ``chat_template`` in the
published ``tokenizer_config.json``, in files:

    python tests/rl_code/environment/make_golden_deepseek_v3_1.py v3.1.jinja terminus.jinja

What is left out: earlier thoughts, which the templates drop, declared functions, and openings behind
results with thoughts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jinja2

OUT = Path(__file__).parent / "golden" / "deepseek_v3_1.json"
BEGIN = "<｜begin▁of▁sentence｜>"
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
# conversations, and whether they are written with thoughts too
TALKS = {
    "results": ([SYSTEM, SYSTEM, ASKED, called(*CALLS), *RESULTS], False),
    "answer": ([ASKED, called(*CALLS[:2]), *RESULTS[:2], ANSWER, ASKED, ANSWER, ASKED], True),
    "question": ([SYSTEM, ASKED], True),
}


def with_texts(talk: list[dict]) -> list[dict]:
    """A conversation whose calls are as the published templates take them."""
    found = json.loads(json.dumps(talk))
    for message in found:
        for one in message.get("tool_calls", ()):
            function = one["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def main(paths: list[str]) -> None:
    """Writes the file. paths: of the published templates, which must write the same."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    content: dict[str, list] = {}
    for path in paths:
        template = environment.from_string(Path(path).read_text(encoding="utf-8"))
        for name, (talk, thinks) in TALKS.items():
            for thinking in (False, True)[: 1 + thinks]:
                given = dict(bos_token=BEGIN, add_generation_prompt=True, thinking=thinking)
                text = template.render(messages=with_texts(talk), **given)
                key = f"{name}, thinking" if thinking else name
                assert content.setdefault(key, [talk, thinking, text])[2] == text, (path, key)
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
