"""llama-index with an OpenAI-like model: tool calls, streamed and not, and structured output."""

import json
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model has to fill in."""

    colour: Literal["red", "green"]


def set_lamp(colour: Literal["red", "green"]) -> str:
    """Set the colour of the lamp."""
    return colour


url, model = sys.argv[1:]
chat = OpenAILike(
    api_base=url,
    api_key="unused",
    model=model,
    temperature=1.0,
    max_retries=0,
    context_window=2048,
    max_tokens=1000,
    is_chat_model=True,
    is_function_calling_model=True,
    additional_kwargs={"seed": 7},
)
question = ChatMessage(role="user", content="Name a colour.")
lamp = FunctionTool.from_defaults(set_lamp)
called = [
    chat.chat_with_tools([lamp], user_msg=question, tool_required=True),
    list(chat.stream_chat_with_tools([lamp], user_msg=question, tool_required=True))[-1],
]
print(
    json.dumps(
        {
            "tool_calls": [
                [[call.tool_name, call.tool_kwargs] for call in chat.get_tool_calls_from_response(answer)]
                for answer in called
            ],
            "structured": chat.as_structured_llm(Answer).chat([question]).raw.model_dump(),
        }
    )
)
