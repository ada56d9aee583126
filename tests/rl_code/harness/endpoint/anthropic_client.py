"""The published client of the Messages API, asked by a test in a Python that has it.

python anthropic_client.py BASE_URL: asks twice, once whole and once as a stream, sends the first
answer back as it came, and prints what the client read as JSON.
"""

import json
import sys

import anthropic

TOOL = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
FIRST = [{"role": "user", "content": "go"}]


def main(url):
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
    asked = dict(model="policy", max_tokens=99, tools=[TOOL], system="be short")
    whole = client.messages.create(messages=FIRST, **asked)
    calls = [block for block in whole.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
    history = [
        *FIRST,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "on"}]},
    ]
    with client.messages.stream(messages=history, **asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    count = client.messages.count_tokens(model="policy", messages=FIRST, system="be short")
    try:
        client.messages.create(messages=FIRST, **asked | {"model": "other"})
        error = None
    except anthropic.NotFoundError as refused:
        error = refused.body
    print(
        json.dumps(
            {
                "whole": whole.model_dump(),
                "kinds": kinds,
                "streamed": streamed.model_dump(),
                "count": count.input_tokens,
                "error": error,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
