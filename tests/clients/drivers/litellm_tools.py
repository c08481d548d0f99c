"""litellm: structured output and tool calls, streamed and not."""

import json
import sys

import litellm

url, model = sys.argv[1:]
chat = {
    "base_url": url,
    "api_key": "unused",
    "model": f"openai/{model}",
    "messages": [{"role": "user", "content": "Name a colour."}],
    "seed": 7,
    "temperature": 1.0,
    "max_tokens": 1000,
    "num_retries": 0,
}
schema = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "bright": {"type": "boolean"}},
    "required": ["colour", "bright"],
    "additionalProperties": False,
}
response_format = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema, "strict": True}}
tools = {
    "tools": [{"type": "function", "function": {"name": "set_lamp", "parameters": schema}}],
    "tool_choice": {"type": "function", "function": {"name": "set_lamp"}},
}
structured = litellm.completion(**chat, response_format=response_format).choices[0].message.content
chunks = list(litellm.completion(**chat, **tools, stream=True))
called = [litellm.completion(**chat, **tools), litellm.stream_chunk_builder(chunks, messages=chat["messages"])]

print(
    json.dumps(
        {
            "structured": json.loads(structured),
            "tool_calls": [
                [
                    [call.function.name, json.loads(call.function.arguments)]
                    for call in one.choices[0].message.tool_calls
                ]
                for one in called
            ],
            "finish_reasons": [one.choices[0].finish_reason for one in called],
        }
    )
)
