"""What a terminal is shown of a model's text."""

from __future__ import annotations

from pdserve.cli.printable import printable


def test_escape_sequences_lose_their_power_and_text_stays() -> None:
    assert printable("a\x1b[2Jb\rc\x9b\x07") == "a\N{REPLACEMENT CHARACTER}[2Jb\ufffdc\ufffd\ufffd"
    assert printable("naïve 🌶\n\tx") == "naïve 🌶\n\tx"
