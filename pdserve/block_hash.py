"""Names for the content of full KV blocks, so that equal prefixes are found: chained hashes of token ids.

    hash[i] = H(hash[i - 1] | tokens of block i)      hash[-1] = H(scope), or H'(hash of the scope | salt)

The chain makes position and everything before it part of a name: equal tokens elsewhere have another one. The scope is
what else the bytes depend on: the model's weights and the block size. Nothing in it depends on the process (no
`hash()`), so every worker and every router of a cluster gives the same block the same name.

A salt gives a sequence a chain of its own: its blocks are found by sequences of equal salt alone, so that nobody else
can tell from the time of an answer whether they are there. H' is another function than H, because a salt of the bytes
of some tokens must not lead into the middle of a chain.

H is SHA-256 cut to 128 bits: token ids are the clients' choice, and with a hash made for speed alone a client could
craft two prompts with one name, and read another's KV. Processors have instructions for it, so that most of the half
microsecond per block is Python's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

NAME_NBYTES: Final = 16

_TOKEN_NBYTES: Final = 4
"""Little-endian on every machine."""
_BLOCKS_AT_ONCE: Final = 256
"""Hashed together: so many that their tokens stay in a fast cache."""


class BlockHashes:
    """The chain of one sequence, which grows with it."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._last = root
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def fork(self) -> BlockHashes:
        """The chain of a sequence that has been this one so far."""
        chain = BlockHashes(self._last, self._block_size)
        chain._hashes = list(self._hashes)
        return chain

    def upto(self, num_tokens: int, token_ids: Sequence[int]) -> list[bytes]:
        """Names of the full blocks among the first `num_tokens` of `token_ids`, all tokens of the sequence so far.

        Only blocks that were not asked for before are hashed: earlier token ids must not have changed.
        """
        assert num_tokens <= len(token_ids), f"{num_tokens} of {len(token_ids)} tokens"
        num_blocks = num_tokens // self._block_size
        for begin in range(len(self._hashes), num_blocks, _BLOCKS_AT_ONCE):
            end = min(num_blocks, begin + _BLOCKS_AT_ONCE)
            self._extend(token_ids[begin * self._block_size : end * self._block_size])
        return self._hashes[:num_blocks]

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Hash whole blocks. All names are local here: a long prompt has thousands of blocks."""
        last, append, hash_ = self._last, self._hashes.append, sha256
        data = struct.pack(f"<{len(token_ids)}I", *token_ids)
        for (tokens,) in struct.iter_unpack(f"{self._block_size * _TOKEN_NBYTES}s", data):
            last = hash_(last + tokens).digest()[:NAME_NBYTES]
            append(last)
        self._last = last


class BlockHasher:
    """Makes chains of one scope."""

    def __init__(self, *, model_fingerprint: str, block_size: int) -> None:
        scope = "\0".join(("pdserve-kv-1", model_fingerprint, str(block_size)))
        self._root = sha256(scope.encode()).digest()[:NAME_NBYTES]
        self.block_size = block_size

    def chain(self, salt: str = "") -> BlockHashes:
        """The chain of a new sequence."""
        root = self._root
        if salt:
            # Hashed again to be 38 bytes whatever the salt is: no block is hashed as so many.
            salted = sha256(b"cache salt" + root + salt.encode()).digest()
            root = sha256(b"salted" + salted).digest()[:NAME_NBYTES]
        return BlockHashes(root, self.block_size)
