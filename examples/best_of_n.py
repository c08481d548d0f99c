"""Several outputs of one prompt, of which the one that the model finds most likely is kept.

    python examples/best_of_n.py [ROUTER]

The prompt is computed once, and its KV moves once, however many outputs there are.
"""

import sys

from pdserve.client import DEFAULT_ADDRESS, Client, Output


def mean_logprob(output: Output) -> float:
    """Longer outputs are not punished for their length."""
    return sum(token.logprob for token in output.logprobs) / len(output.logprobs)


address = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ADDRESS

with Client(address) as client:
    generation = client.generate("The best thing about rain is", n=4, seed=1, max_tokens=24, logprobs=0, stop=".")
    for output in sorted(generation.outputs, key=mean_logprob, reverse=True):
        print(f"{mean_logprob(output):7.3f}  {output.text.strip()}")
    print(f"{generation.usage.completion_tokens} tokens from one prompt of {generation.usage.prompt_tokens}")
