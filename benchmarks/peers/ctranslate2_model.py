"""The model in CTranslate2's format, made from our reading of it: `python ctranslate2_model.py MODEL DIRECTORY`.

Tokens get numbers for names. Speed does not depend on how they are spelled, and the converter takes no GGUF tokenizer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

QUANTIZATIONS = ("float32", "int8")


def token_name(token_id: int) -> str:
    """What a token is called in the converted vocabulary."""
    return f"t{token_id}"


def convert(model: str, directory: Path) -> None:
    """Write DIRECTORY/float32 and DIRECTORY/int8."""
    from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from pdserve.model.source import open_model
    from pdserve.testing.reference import transformers_model

    source = open_model(model)
    with tempfile.TemporaryDirectory() as checkpoint:
        transformers_model(source).save_pretrained(checkpoint)
        vocabulary = {token_name(i): i for i in range(source.config.vocab_size)}
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=token_name(0))),
            bos_token=token_name(1), eos_token=token_name(2), unk_token=token_name(0),
        ).save_pretrained(checkpoint)  # fmt: skip
        for quantization in QUANTIZATIONS:
            TransformersConverter(checkpoint).convert(
                str(directory / quantization), quantization=quantization, force=True
            )


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]))
