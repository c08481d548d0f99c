"""Names for the content of full KV blocks, so that equal prefixes are found: chained hashes of token ids.

    hash[i] = H(hash[i - 1] | tokens of block i)      hash[-1] = H(scope)

The chain makes position and everything before it part of a name: equal tokens elsewhere have another one. The scope is
what else the bytes depend on: the model's weights and the block size. Nothing in it depends on the process (no
`hash()`), so every worker of a cluster gives the same block the same name.

H is BLAKE2b with 128 bits: token ids are the clients' choice, and with a hash made for speed alone a client could craft
two prompts with one name, and read another's KV. It takes about a microsecond per block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_NBYTES = 16


class BlockHashes:
    """The chain of one sequence, which grows with it."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._last = root
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def upto(self, num_tokens: int, token_ids: Sequence[int]) -> list[bytes]:
        """Names of the full blocks among the first `num_tokens` of `token_ids`, all tokens of the sequence so far.

        Only blocks that were not asked for before are hashed: earlier token ids must not have changed.
        """
        assert num_tokens <= len(token_ids), f"{num_tokens} of {len(token_ids)} tokens"
        num_blocks = num_tokens // self._block_size
        if num_blocks > len(self._hashes):
            begin = len(self._hashes) * self._block_size
            new = np.asarray(token_ids[begin : num_blocks * self._block_size], dtype="<u4")
            for tokens in new.reshape(-1, self._block_size):
                self._last = hashlib.blake2b(self._last + tokens.tobytes(), digest_size=DIGEST_NBYTES).digest()
                self._hashes.append(self._last)
        return self._hashes[:num_blocks]


class BlockHasher:
    """Makes chains of one scope."""

    def __init__(self, *, model_fingerprint: str, block_size: int) -> None:
        scope = "\0".join(("pdserve-kv-1", model_fingerprint, str(block_size)))
        self._root = hashlib.blake2b(scope.encode(), digest_size=DIGEST_NBYTES).digest()
        self.block_size = block_size

    def chain(self) -> BlockHashes:
        """The chain of a new sequence."""
        return BlockHashes(self._root, self.block_size)
