"""The output of one request: token order across workers and attempts, and the text that is certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import InternalError
from pdserve.tokenizer import IncrementalDetokenizer, StopStringMatcher, Tokenizer
from pdserve.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Ending:
    """How the output of a request ends."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended it, if one did."""
    stop_string: str | None = None
    """The string that ended it, if one did."""


class TokenSequence:
    """Puts tokens in the order of their index. They may come twice, and the decode worker's before the first one.

    Only a run without gaps is ever given out. What waits behind a gap belongs to the current attempt; what was given
    out stays for ever.
    """

    __slots__ = ("_end", "_logprobs", "_max_tokens", "_tokens", "_waiting")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._waiting: dict[int, int] = {}
        self._logprobs: dict[int, TokenLogprobs] = {}
        """By index, until they are taken."""
        self._end: tuple[int, FinishReason] | None = None
        """Number of tokens at the end, and why it ends."""

    @property
    def tokens(self) -> Sequence[int]:
        """The gapless run, in order."""
        return self._tokens

    @property
    def finished(self) -> FinishReason | None:
        """Why the output ends, once every token up to the end is there."""
        return self._end[1] if self._end is not None and len(self._tokens) >= self._end[0] else None

    def add(
        self,
        first_index: int,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[int]:
        """Take tokens from `first_index` on, of which the last one ends the output if `finish` is set.

        Returns the tokens that became part of the gapless run. Raises InternalError for an index that this output
        cannot have.
        """
        end = first_index + len(token_ids)
        if first_index < 0 or end > (self._max_tokens if self._end is None else self._end[0]):
            raise InternalError(f"a worker sent output token {end - 1} of at most {self._max_tokens}")
        if finish is not None:
            if end < len(self._tokens):
                raise InternalError(f"a worker ended the output after {end} tokens, {len(self._tokens)} are out")
            self._end = (end, finish)
        for index, logprob in enumerate(logprobs, start=first_index):
            if index >= len(self._tokens):
                self._logprobs.setdefault(index, logprob)
        for index, token_id in enumerate(token_ids, start=first_index):
            if index >= len(self._tokens):
                self._waiting.setdefault(index, token_id)
        known = len(self._tokens)
        while (token := self._waiting.pop(len(self._tokens), None)) is not None:
            self._tokens.append(token)
        return self._tokens[known:]

    def add_next(self, index: int, token_id: int) -> bool:
        """Take token number `index` if it is simply the next one: no others wait, and no end is known. False: nothing
        has changed."""
        tokens = self._tokens
        if index != len(tokens) or index >= self._max_tokens or self._waiting or self._end is not None:
            return False
        tokens.append(token_id)
        return True

    @property
    def has_gap(self) -> bool:
        """Whether tokens are here that belong behind missing ones."""
        return bool(self._waiting)

    def take_logprobs(self, begin: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of tokens `begin` to `end` of the gapless run, once. Raises InternalError for a token that
        came without."""
        try:
            return tuple(self._logprobs.pop(index) for index in range(begin, end))
        except KeyError as error:
            raise InternalError(f"a worker sent output token {error.args[0]} without its log-probability") from error

    def start_over(self) -> None:
        """A new attempt begins after the gapless run."""
        self._waiting.clear()
        self._logprobs.clear()
        self._end = None


class PromptScores:
    """Log-probabilities of the prompt's tokens from the second on, each given out once over all attempts."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._next = 1

    @property
    def complete(self) -> bool:
        """Whether those of the whole prompt were given out."""
        return self._next >= self._num_prompt_tokens

    def add(self, first_index: int, tokens: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
        """Take those of the prompt's tokens from `first_index` on; gives the ones that are new. Raises InternalError
        for tokens that cannot come now."""
        end = first_index + len(tokens)
        if not 1 <= first_index <= self._next or end > self._num_prompt_tokens:
            raise InternalError(
                f"a worker sent log-probabilities of prompt tokens {first_index} to {end - 1} after {self._next - 1} "
                f"of {self._num_prompt_tokens}"
            )
        new = tokens[self._next - first_index :]
        self._next = max(self._next, end)
        return new


class TextOutput:
    """Text of an output as it grows: no part of a character, nothing that may still become a stop string.

    Stop strings count only in the text of tokens after the first `min_tokens`, as stop tokens do.
    """

    __slots__ = ("_detokenizer", "_include_stop_string", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop_strings: Sequence[str],
        min_tokens: int,
        *,
        skip_special_tokens: bool = True,
        include_stop_string: bool = False,
    ) -> None:
        """`skip_special_tokens`: those add nothing to the text. `include_stop_string`: text ends after it."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._include_stop_string = include_stop_string
        self._matcher = StopStringMatcher(stop_strings) if stop_strings else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> tuple[list[str], str | None]:
        """Take more tokens: (the text that becomes certain with each that counts, the stop string completed or None).

        A stop string ends the output with the token that completes it. Nothing may be pushed after that.
        """
        texts: list[str] = []
        for token_id in token_ids:
            text = self._detokenizer.push_token(token_id)
            self._num_tokens += 1
            if self._matcher is None or self._num_tokens <= self._min_tokens:
                texts.append(text)
                continue
            text, stop = self._match(self._matcher, text)
            texts.append(text)
            if stop is not None:
                return texts, stop
        return texts, None

    @property
    def has_stop_strings(self) -> bool:
        """Whether the text may end the output."""
        return self._matcher is not None

    def push_token(self, token_id: int) -> str:
        """As `push` of one token, without stop strings: the text that becomes certain."""
        self._num_tokens += 1
        return self._detokenizer.push_token(token_id)

    def finish(self) -> tuple[str, str | None]:
        """The text that was held back, at the end of the output; it may complete a stop string after all."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return rest, None
        text, stop = self._match(self._matcher, rest)
        return (text, stop) if stop is not None else (text + self._matcher.finish(), None)

    def _match(self, matcher: StopStringMatcher, text: str) -> tuple[str, str | None]:
        text, stop = matcher.push(text)
        return (text + stop if stop is not None and self._include_stop_string else text), stop


class Output:
    """Tokens and text of one request over all its attempts."""

    __slots__ = ("_ending", "_num_tokens", "_sequence", "_text")

    def __init__(self, tokens: TokenSequence, text: TextOutput) -> None:
        self._sequence = tokens
        self._text = text
        self._num_tokens = 0
        self._ending: Ending | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """Every token of the output so far, in order. Cut where a stop string was completed."""
        return self._sequence.tokens[: self._num_tokens]

    @property
    def num_tokens(self) -> int:
        """Length of `tokens`."""
        return self._num_tokens

    @property
    def ending(self) -> Ending | None:
        """How the output ended; None while it goes on or a token before the end is missing."""
        return self._ending

    def add(
        self,
        first_index: int,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> tuple[list[int], list[str]]:
        """Take tokens of a worker: (tokens that are now part of the output, the text that is certain with each).

        What was held back until the end belongs to the last token. Nothing may be added after the end. Raises
        InternalError for an index that this output cannot have, and for an end without a token.
        """
        assert self._ending is None, "tokens after the end"
        new = self._sequence.add(first_index, token_ids, finish, logprobs)
        reason = self._sequence.finished
        # A stop token is counted and returned as a token; its text is not wanted.
        shown = new[:-1] if reason is FinishReason.STOP else new
        texts, stop = self._text.push(shown)
        if stop is not None:
            new = new[: len(texts)]
            self._ending = Ending(FinishReason.STOP, stop_string=stop)
        elif reason is not None:
            if not new:
                raise InternalError(f"a worker ended the output after token {self._num_tokens - 1}, which did not")
            rest, stop = self._text.finish()
            if len(texts) < len(new):
                texts.append(rest)
            else:
                texts[-1] += rest
            if stop is not None:
                self._ending = Ending(FinishReason.STOP, stop_string=stop)
            elif reason is FinishReason.STOP:
                self._ending = Ending(reason, stop_token_id=self._sequence.tokens[-1])
            else:
                self._ending = Ending(reason)
        self._num_tokens += len(new)
        return new, texts

    def add_next(self, index: int, token_id: int) -> str | None:
        """As `add` of one token that ends nothing, if it is simply the next one and there are no stop strings: the text
        that is certain with it. None: nothing has changed."""
        if self._ending is not None or self._text.has_stop_strings or not self._sequence.add_next(index, token_id):
            return None
        self._num_tokens += 1
        return self._text.push_token(token_id)

    @property
    def has_gap(self) -> bool:
        """Whether workers have sent tokens that belong behind missing ones."""
        return self._sequence.has_gap

    def take_logprobs(self, count: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the newest `count` tokens, once. Raises InternalError for a token that came without."""
        return self._sequence.take_logprobs(self._num_tokens - count, self._num_tokens)

    def start_over(self) -> None:
        """A new attempt begins after `tokens`."""
        self._sequence.start_over()
