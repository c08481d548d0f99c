"""The child's side of a peer that runs as a process: a workload a line in, tokens per second a line out.

Imports only the standard library, as it runs in the environment of the peer.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Protocol

VOCAB_SIZE = 40000
"""Random prompts stay below it: beyond are special and rare tokens in no model that is compared here."""


class PeerEngine(Protocol):
    """What a peer can do."""

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prompt."""

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens per second of all streams together, prompts left out."""


def serve(engine: PeerEngine) -> None:
    """Answer requests on standard input until it ends."""
    # Libraries print to standard output whatever they like; answers go to a copy of it that they do not know.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("kind")
        speed = engine.prefill(**request) if kind == "prefill" else engine.decode(**request)
        print(json.dumps({"tokens_per_s": speed}), file=answers, flush=True)


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Distinct prompts, so that no prefix cache helps."""
    return [[random.randrange(1000, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]
