"""langchain-openai: invoke, stream, batch, async, logprobs, stop, n, and the legacy completion."""

import asyncio
import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
common = {"base_url": url, "api_key": "unused", "model": model, "seed": 7, "temperature": 1.0, "max_retries": 0}
chat = ChatOpenAI(**common, max_completion_tokens=12, extra_body={"ignore_eos": True})
question = [SystemMessage("Be brief."), HumanMessage("Name a colour.")]

whole = chat.invoke(question)
chunks = list(chat.stream(question, stream_usage=True))
joined = chunks[0]
for chunk in chunks[1:]:
    joined += chunk


async def talk() -> str:
    return "".join([chunk.content async for chunk in chat.astream(question)])


scored = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
two = ChatOpenAI(**common, n=2, max_completion_tokens=12, extra_body={"ignore_eos": True}).generate([question])
stopped = chat.invoke(question, stop=[whole.content[3:5]])
legacy = OpenAI(**common, max_tokens=6, n=2, best_of=1).generate(["Once upon"])

print(
    json.dumps(
        {
            "text": whole.content,
            "usage": whole.usage_metadata,
            "finish_reason": whole.response_metadata["finish_reason"],
            "streamed": joined.content,
            "num_chunks": len(chunks),
            "streamed_usage": joined.usage_metadata,
            "streamed_finish_reason": joined.response_metadata["finish_reason"],
            "async_streamed": asyncio.run(talk()),
            "batch": [one.content for one in chat.batch([question, question])],
            "logprobs": scored.response_metadata["logprobs"]["content"],
            "choices": [one.text for one in two.generations[0]],
            "stopped": [stopped.content, stopped.response_metadata["finish_reason"]],
            "legacy": [one.text for one in legacy.generations[0]],
            "legacy_streamed": "".join(OpenAI(**common, max_tokens=6).stream("Once upon")),
            "legacy_whole": OpenAI(**common, max_tokens=6).invoke("Once upon"),
        }
    )
)
