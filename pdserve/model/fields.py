"""Typed reading of a model file's key-value part, with errors that name the file, the key and the value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from pdserve.errors import ModelLoadError

_MAX_INT = 2**31 - 1


class Fields:
    """The keys of one file. A key that holds null counts as absent, as in Hugging Face configs.

    Every method raises ModelLoadError for a value of the wrong type or out of range, and for an absent one that has no
    default.
    """

    def __init__(self, file: Path, values: Mapping[str, object]) -> None:
        self.file = file
        self._values = values

    def __contains__(self, key: str) -> bool:
        """Whether the key is there at all, even with null."""
        return key in self._values

    def raw(self, key: str) -> object:
        """The value as it is, None if absent."""
        return self._values.get(key)

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the ModelLoadError for this key; `problem` reads on after "FILE: KEY"."""
        raise ModelLoadError(f"{self.file}: {key} {problem}", field=key, file=str(self.file))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer in [minimum, 2**31)."""
        value = self.optional_integer(key, minimum=minimum)
        if value is not None:
            return value
        if default is None:
            self.fail(key, "is missing")
        return default

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """An integer in [minimum, 2**31), or None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _MAX_INT:
            self.fail(key, f"must be an integer from {minimum} to {_MAX_INT}, got {_show(value)}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.raw(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        # A JSON integer may be too large for a float, hence the bound before the conversion.
        ok = (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30 and math.isfinite(value)
        )
        if not ok:
            self.fail(key, f"must be a number above 0, got {_show(value)}")
        assert isinstance(value, int | float)
        return float(value)

    def shortest_positive(self, key: str, default: float | None = None) -> float:
        """As `positive` for a number kept in float32: the shortest decimal that rounds to it.

        That is what the author wrote: 1e-05, not 9.999999747378752e-06.
        """
        value = np.float32(self.positive(key, default))
        return float(np.format_float_positional(value, unique=True))

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, got {_show(value)}")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self.raw(key)
        if value is None:
            self.fail(key, "is missing")
        if not isinstance(value, str):
            self.fail(key, f"must be a string, got {_show(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """One id or a list of ids, without repeats and in order; None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= _MAX_INT:
                self.fail(key, f"must be a token id or a list of token ids, got {_show(value)}")
        return tuple(dict.fromkeys(ids))

    def section(self, key: str) -> Fields | None:
        """The mapping under a key, its own keys named `KEY.SUBKEY` in errors; None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, f"must be a mapping, got {_show(value)}")
        return _Section(self.file, value, key)

    def only(self, key: str, allowed: Collection[object], why: str) -> None:
        """Refuse a feature that is not implemented: the value, if present, must be one of `allowed`."""
        value = self.raw(key)
        # Python's 0 == False and 1 == True are harmless here: the lists say "off" in every spelling.
        if value is not None and (not isinstance(value, str | int | float) or value not in allowed):
            self.fail(key, f"is {_show(value)}: {why}")


class _Section(Fields):
    def __init__(self, file: Path, values: Mapping[str, object], prefix: str) -> None:
        super().__init__(file, values)
        self._prefix = prefix

    def fail(self, key: str, problem: str) -> NoReturn:
        super().fail(f"{self._prefix}.{key}", problem)


def _show(value: object) -> str:
    # Hostile or merely odd values may be huge; repr() of an enormous int is quadratic and limited by Python itself.
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
