"""A text of known length in tokens: what prompts and outputs of the benchmark consist of."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.tokenizer import Tokenizer

_SENTENCES = (
    "The harbour was quiet when the first boats came in, low in the water and late by an hour.",
    "Nobody had counted the crates, but everybody agreed that there were fewer of them than in spring.",
    'A gull sat on the crane; "that one," the foreman said, "has seen more cargo than you and me."',
    "By noon the fog had gone, and with it the last excuse for leaving the northern sheds locked.",
    "She wrote the number 4217 on the door in chalk, crossed it out, and wrote 4218 underneath.",
)


def text_of(tokenizer: Tokenizer, num_tokens: int, first: int = 0) -> str:
    """A text of exactly `num_tokens` tokens that begins with sentence number `first`."""
    num_sentences = num_tokens // 8 + 1
    whole = " ".join(_SENTENCES[(first + i) % len(_SENTENCES)] for i in range(num_sentences))
    text = tokenizer.decode(tokenizer.encode(whole)[:num_tokens], skip_special_tokens=True)
    assert len(tokenizer.encode(text)) == num_tokens, "cut inside of a word that is now spelt otherwise"
    return text


def output_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """Token ids of English text, for outputs that go through it again and again."""
    return tokenizer.encode(" ".join(_SENTENCES), add_special_tokens=False)
