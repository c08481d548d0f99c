"""One program begins a request, another one finishes reading it: nothing is generated twice.

    python examples/hand_over.py [ROUTER]

Within one program none of this is needed: a stream whose connection breaks goes on by itself.
"""

import sys

from pdserve.client import DEFAULT_ADDRESS, Client

address = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ADDRESS

# The first program gets four tokens and is gone: closing its client, and not the stream, is like pulling the plug.
with Client(address) as first:
    stream = first.stream("Once upon a time", max_tokens=32, temperature=0)
    text, num_tokens = "", 0
    while num_tokens < 4:
        delta = next(stream)
        text, num_tokens = text + delta.text, delta.num_tokens
    print(f"first program, {num_tokens} tokens: {text!r}")

# All that the second one needs is the name of the request and how many tokens are known.
with Client(address) as second, second.attach(stream.request_id, [num_tokens]) as rest:
    print(f"second program: {rest.result().text!r}")
