"""Names of blocks: chained, scoped, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

from pdserve.block_hash import BlockHasher

HASHER = BlockHasher(model_fingerprint="m", block_size=4)


def names(tokens: list[int], hasher: BlockHasher = HASHER) -> list[bytes]:
    return hasher.chain().upto(len(tokens), tokens)


def test_only_full_blocks_have_names() -> None:
    assert [len(names(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_name_depends_on_everything_before_it() -> None:
    """O-PFX-2: [X][Y] and [Y][X] have no block in common."""
    x, y = [1, 2, 3, 4], [5, 6, 7, 8]
    assert not set(names(x + y)) & set(names(y + x))
    assert names(x + y)[0] == names(x)[0]
    assert names(y + y)[0] != names(y + y)[1]


def test_scope_keeps_models_and_block_sizes_apart() -> None:
    others = [
        BlockHasher(model_fingerprint="n", block_size=4),
        BlockHasher(model_fingerprint="m\x004", block_size=4),
        BlockHasher(model_fingerprint="m", block_size=8),
    ]
    tokens = list(range(8))
    assert len({names(tokens, hasher)[0] for hasher in (HASHER, *others)}) == 4


def test_salt_gives_a_chain_of_its_own() -> None:
    tokens = list(range(8))
    chains = [HASHER.chain(salt).upto(8, tokens) for salt in ("", "a", "b")]
    assert len({name for chain in chains for name in chain}) == 6
    assert HASHER.chain("a").upto(8, tokens) == chains[1]


def test_salt_of_the_bytes_of_tokens_does_not_lead_into_the_middle_of_a_chain() -> None:
    first, rest = [65, 66, 67, 68], [1, 2, 3, 4]
    salt = b"".join(token.to_bytes(4, "little") for token in first).decode()
    assert HASHER.chain(salt).upto(4, rest)[0] not in names(first + rest)


def test_forked_chain_goes_on_as_if_it_were_the_first_one() -> None:
    chain = HASHER.chain("salt")
    chain.upto(4, [1, 2, 3, 4])
    fork = chain.fork()
    ours, theirs = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]
    assert chain.upto(8, ours) == HASHER.chain("salt").upto(8, ours)
    assert fork.upto(8, theirs) == HASHER.chain("salt").upto(8, theirs)


def test_growing_chain_equals_one_made_at_once() -> None:
    tokens = [7] * 30
    chain = HASHER.chain()
    for n in (3, 4, 11, 11, 30):
        assert chain.upto(n, tokens[:n]) == names(tokens)[: n // 4]
    assert chain.upto(4, tokens) == names(tokens)[:1], "asking for less than before is fine"


def test_large_token_ids_are_told_apart() -> None:
    assert len({names([0, 0, 0, t])[0] for t in (0, 1, 255, 256, 65536, 2**31 - 1)}) == 6


def test_names_are_the_same_in_every_process() -> None:
    """O-PFX-4."""
    program = (
        "from pdserve.block_hash import BlockHasher;"
        "h = BlockHasher(model_fingerprint='m', block_size=4);"
        "print([n.hex() for n in h.chain().upto(9, list(range(9)))], hash('x'))"
    )
    printed = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        printed.append(run.stdout.rsplit("]", 1))
    assert printed[0][0] == printed[1][0] == str([n.hex() for n in names(list(range(9)))])[:-1]
    assert printed[0][1] != printed[1][1], "the seed does change Python's own hash"
