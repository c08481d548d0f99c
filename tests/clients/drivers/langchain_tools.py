"""langchain-openai: structured output by schema and by tool, tool calls, streamed and not."""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Lamp(BaseModel):
    """What the model has to fill in."""

    colour: Literal["red", "green", "blue"]
    bright: bool


def set_lamp(colour: Literal["red", "green"]) -> str:
    """Set the colour of the lamp."""
    return colour


url, model = sys.argv[1:]
chat = ChatOpenAI(
    base_url=url, api_key="unused", model=model, seed=7, temperature=1.0, max_retries=0, max_completion_tokens=1000
)
question = [HumanMessage("Name a colour.")]


def join(stream):
    whole = None
    for chunk in stream:
        whole = chunk if whole is None else whole + chunk
    return whole


structured = [chat.with_structured_output(Lamp, method=m, strict=True) for m in ("json_schema", "function_calling")]
chosen = chat.bind_tools([set_lamp], tool_choice="set_lamp")
calls = [
    chosen.invoke(question),
    join(chosen.stream(question)),
    chat.bind_tools([set_lamp], tool_choice="any").invoke(question),
]

print(
    json.dumps(
        {
            "structured": [one.invoke(question).model_dump() for one in structured],
            "structured_streamed": [list(one.stream(question))[-1].model_dump() for one in structured],
            "tool_calls": [answer.tool_calls for answer in calls],
            "finish_reasons": [answer.response_metadata["finish_reason"] for answer in calls],
        }
    )
)
