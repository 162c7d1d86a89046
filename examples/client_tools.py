"""OpenAI's client on `pagewire serve`: the model calls a function, gets its result, and answers.

pagewire serve Qwen/Qwen3-8B &
python examples/client_tools.py

A model whose dialect of calls is known (the server's log says so) may choose to call; any other must be told to, by
--required, as here the demo model.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

WEATHER = {"Oslo": "rain, 8 degrees", "Rome": "sun, 27 degrees"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": list(WEATHER)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none")
parser.add_argument("--required", action="store_true", help="the model must call in the first turn")
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
choice: Any = "required" if arguments.required else "auto"
for _ in range(4):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice=choice,
        max_tokens=200,
        parallel_tool_calls=False,
    )
    message: Any = answer.choices[0].message
    messages.append(message.to_dict())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city!r}) -> {WEATHER[city]}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
    choice = "none" if arguments.required else "auto"
print(message.content)
