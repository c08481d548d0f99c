"""llama-index with an OpenAI-like model: chat and completion, streamed and not, async."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
common = {
    "api_base": url,
    "api_key": "unused",
    "model": model,
    "temperature": 1.0,
    "max_retries": 0,
    "context_window": 2048,
    "additional_kwargs": {"seed": 7},
}
question = [ChatMessage(role="user", content="Name a colour.")]
chat = OpenAILike(**common, max_tokens=12, is_chat_model=True)
plain = OpenAILike(**common, max_tokens=6, is_chat_model=False)


async def talk() -> str:
    return "".join([chunk.delta or "" async for chunk in await chat.astream_chat(question)])


whole = chat.chat(question)
print(
    json.dumps(
        {
            "text": whole.message.content,
            "usage": [whole.raw.usage.prompt_tokens, whole.raw.usage.completion_tokens],
            "streamed": "".join(chunk.delta or "" for chunk in chat.stream_chat(question)),
            "async_streamed": asyncio.run(talk()),
            "completion": plain.complete("Once upon").text,
            "completion_streamed": "".join(chunk.delta or "" for chunk in plain.stream_complete("Once upon")),
        }
    )
)
