"""Text to token ids and back: tokenizers, chat templates, streaming text, stop strings. No torch, no transformers."""

from pdserve.tokenizer.detokenizer import IncrementalDetokenizer
from pdserve.tokenizer.loader import TokenizerSource, load_tokenizer
from pdserve.tokenizer.stop_strings import StopStringMatcher
from pdserve.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopStringMatcher", "Tokenizer", "TokenizerSource", "load_tokenizer"]
