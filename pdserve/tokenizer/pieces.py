"""From token pieces to bytes and text: how one vocabulary spells its tokens.

Every supported vocabulary is one of two kinds, and in both a token is a fixed string of bytes whatever stands around
it. So text is those bytes joined and read as UTF-8, and streaming it needs no window of earlier tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ModelLoadError

SPACE_MARKER = "▁"
"""U+2581: what SentencePiece vocabularies write for a space."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(enum.Enum):
    """How pieces stand for bytes."""

    BYTE_LEVEL = "byte-level"
    """Each of the 256 bytes has a printable stand-in character, as in GPT-2."""
    BYTE_FALLBACK = "byte-fallback"
    """Pieces are text, U+2581 for spaces; bytes outside the vocabulary are pieces `<0xNN>`. SentencePiece, Llama 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRule:
    """How the pieces of a token sequence become text."""

    spelling: Spelling
    strip_leading_space: bool = False
    """One space at the very start of the text goes: encoding had put it there."""

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes that a token stands for."""
        if self.spelling is Spelling.BYTE_LEVEL:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in piece])
            except KeyError:
                # Added tokens are written plainly, and may hold characters outside the byte alphabet.
                return piece.encode("utf-8")
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(SPACE_MARKER, " ").encode("utf-8")

    def text(self, data: bytes) -> str:
        """All bytes of a sequence as text; each maximal invalid run is one U+FFFD (Unicode 3.9, table 3-8)."""
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text


def decode_rule_from_json(decoder: Mapping[str, Any] | None, where: str) -> DecodeRule:
    """Reads the `decoder` section of a tokenizer.json.

    Raises ModelLoadError for any decoder that is not exactly one of the two kinds: decoding it otherwise would give
    wrong text without an error.
    """
    steps = [decoder] if decoder is not None else []
    if decoder is not None and decoder.get("type") == "Sequence":
        steps = list(decoder.get("decoders", []))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRule(spelling=Spelling.BYTE_LEVEL)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace, strips = steps[0], len(steps) == 4
        replaces_marker = replace.get("pattern") == {"String": SPACE_MARKER} and replace.get("content") == " "
        strip = {key: steps[-1].get(key) for key in ("content", "start", "stop")}
        if replaces_marker and (not strips or strip == {"content": " ", "start": 1, "stop": 0}):
            return DecodeRule(spelling=Spelling.BYTE_FALLBACK, strip_leading_space=strips)
    found = " + ".join(str(kind) for kind in kinds) or "none"
    raise ModelLoadError(
        f"{where}: decoder: {found} is not supported; supported are ByteLevel (GPT-2, Llama 3, Qwen) and "
        f"Replace(U+2581) + ByteFallback + Fuse [+ Strip] (SentencePiece, Llama 2)"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters are themselves, other bytes are U+0100 and on, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
