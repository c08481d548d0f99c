"""litellm: chat and text completions, streamed and not, n, log-probabilities, async, an error."""

import asyncio
import json
import sys

import litellm

url, model = sys.argv[1:]
common = {"base_url": url, "api_key": "unused", "seed": 7, "temperature": 1.0, "num_retries": 0}
chat = {**common, "model": f"openai/{model}", "messages": [{"role": "user", "content": "Name a colour."}]}
chat["max_tokens"] = 12
text = {**common, "model": f"text-completion-openai/{model}", "prompt": "Once upon", "max_tokens": 6}


async def talk():
    stream = await litellm.acompletion(**chat, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


whole = litellm.completion(**chat)
stream = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
rebuilt = litellm.stream_chunk_builder(stream, messages=chat["messages"])
two = litellm.completion(**chat, n=2, logprobs=True, top_logprobs=1)
try:
    litellm.completion(**chat | {"temperature": -1.0})
    error = None
except litellm.BadRequestError as refused:
    error = str(refused)

print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "finish_reason": whole.choices[0].finish_reason,
            "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
            "streamed_finish_reason": rebuilt.choices[0].finish_reason,
            "streamed_usage": [rebuilt.usage.prompt_tokens, rebuilt.usage.completion_tokens],
            "hosted_vllm": litellm.completion(**chat | {"model": f"hosted_vllm/{model}"}).choices[0].message.content,
            "async_streamed": asyncio.run(talk()),
            "choices": [one.message.content for one in two.choices],
            "num_logprobs": [len(one.logprobs.content) for one in two.choices],
            "completion": litellm.text_completion(**text).choices[0].text,
            "completion_streamed": "".join(
                chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)
            ),
            "error": error,
        }
    )
)
