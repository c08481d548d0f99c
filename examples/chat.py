"""A conversation: each answer is shown as it comes and becomes part of the next prompt.

    python examples/chat.py [ROUTER]

The router remembers the KV of the conversation so far, so only the new messages are computed.
"""

import sys

from pdserve.client import DEFAULT_ADDRESS, Client

address = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ADDRESS
messages = [{"role": "system", "content": "Answer in one sentence."}]

with Client(address) as client:
    for question in ("Why is the sky blue?", "And why is it red in the evening?"):
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        with client.stream(messages=messages, max_tokens=64, temperature=0) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
            answer = stream.result()
        messages.append({"role": "assistant", "content": answer.text})
        print(f"\n[{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens from cache]\n")
