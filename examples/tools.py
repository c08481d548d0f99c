"""The model may call functions of this program: their results go back to it until it answers in words.

    python examples/tools.py [ROUTER]

The first answer is made to be a call here, so that small models make one, too; its arguments always fit the schema.
"""

import sys

from pydantic import BaseModel

from pdserve.client import DEFAULT_ADDRESS, Client, JsonValue, Message, Tool


class Weather(BaseModel):
    """Arguments of the function below."""

    city: str
    days: int


def weather(arguments: Weather) -> str:
    return f"{arguments.city}: rain, for {arguments.days} days"


address = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ADDRESS
tools = [Tool(name="weather", description="Forecast for a city.", parameters=Weather)]
messages: list[Message] = [{"role": "user", "content": "What will the weather in Bern be like tomorrow?"}]

with Client(address) as client:
    answer = client.generate(messages=messages, tools=tools, tool_choice="required", max_tokens=64, temperature=0)
    messages.append(answer.message)
    for call in answer.tool_calls:
        result = weather(call.parse(Weather))
        print(f"{call.name}({call.arguments}) -> {result}")
        reply: dict[str, JsonValue] = {"role": "tool", "tool_call_id": call.id, "content": result}
        messages.append(reply)
    answer = client.generate(messages=messages, tools=tools, tool_choice="none", max_tokens=64, temperature=0)
    print(answer.text)
