"""An agent program for tests: the standard library, the OpenAI chat API, and one tool.

python minimal_agent.py [tools | text | block] [forgetful | compacting]: "block" finds its command in
the text as mini-swe-agent does, and hands in by that package's command; "forgetful" leaves out all
but the first message and the last two; "compacting" asks for a summary, which then stands in place
of all but the first message.
"""

import json
import os
import re
import sys
import urllib.request

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command"}},
            "required": ["command"],
        },
    },
}
# What "block" says around a task.
SYSTEM = "Answer with a command in a block."
END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def post(path, body):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def answer_to(messages, tools):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **tools}
    return post("chat/completions", body)["choices"][0]["message"]


def main(kind="tools", *options):
    messages = [{"role": "user", "content": sys.stdin.read()}]
    if kind == "block":
        messages[0]["content"] += f"\nEnd with {END}"
        messages.insert(0, {"role": "system", "content": SYSTEM})
    tools = {"tools": [BASH]} if kind == "tools" else {}
    while True:
        message = answer_to(messages, tools)
        messages.append(message)
        if kind == "tools":
            calls = message.get("tool_calls") or []
            commands = [json.loads(call["function"]["arguments"])["command"] for call in calls]
        elif kind == "block":
            calls = []
            block = r"```mswea_bash_command\s*\n(.*?)\n```"
            commands = re.findall(block, message["content"], re.DOTALL)
        else:
            calls, commands = [], [message["content"]]
        if not commands:
            messages.append({"role": "user", "content": "call bash"})
        for number, command in enumerate(commands):
            if command.strip() in ("submit", END):
                return
            done = post("execute", {"command": command})
            output = f"{done['output']}exit {done['returncode']}"
            if calls:
                answer = {"role": "tool", "tool_call_id": calls[number]["id"], "content": output}
            else:
                answer = {"role": "user", "content": output}
            messages.append(answer)
        if "forgetful" in options and len(messages) > 4:
            messages = [messages[0], *messages[-2:]]
        if "compacting" in options:
            asked = {"role": "user", "content": "sum up"}
            summary = answer_to([*messages, asked], tools)["content"]
            messages = [messages[0], {"role": "user", "content": f"So far: {summary}"}]


if __name__ == "__main__":
    main(*sys.argv[1:])
