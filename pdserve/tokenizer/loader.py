"""The tokenizer of a model, whatever format the model is in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pdserve.errors import ModelLoadError
from pdserve.tokenizer.from_gguf import tokenizer_from_gguf
from pdserve.tokenizer.from_hf import tokenizer_from_hf
from pdserve.tokenizer.tokenizer import Tokenizer


class TokenizerSource(Protocol):
    """What an opened model offers to the tokenizer. Exactly one of the two is there."""

    @property
    def path(self) -> Path:
        """Where the model is, for errors."""
        ...

    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Metadata of a GGUF file, keys as in the file."""
        ...

    @property
    def hf_dir(self) -> Path | None:
        """A Hugging Face directory."""
        ...


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Builds it. Raises ModelLoadError, naming file and field, when it is missing, broken or not supported."""
    if source.hf_dir is not None:
        return tokenizer_from_hf(source.hf_dir)
    if source.gguf_metadata is not None:
        return tokenizer_from_gguf(source.gguf_metadata, source.path)
    raise ModelLoadError(f"{source.path}: holds no tokenizer")
