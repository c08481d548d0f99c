"""The log of one output: what has come of it, token by token, for any number of readers.

Text belongs to tokens: what becomes certain with a token is kept with that token. So a position in an output is a
number of tokens, and from any position on everybody reads the same, whoever reads how fast. A token costs about twelve
bytes here, log-probabilities aside.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.errors import PdServeError
from pdserve.types import TokenLogprobs
from router.output import Ending
from router.placement import Estimate
from router.timeline import Phases

LOGPROBS_NBYTES: Final = 120
"""About what an entry of log-probabilities takes, and each of the tokens that it lists as well."""


@dataclass(slots=True)
class Delta:
    """More output."""

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    """Of `token_ids`, if asked for."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of further tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last word on an output that is complete."""

    ending: Ending
    phases: Phases
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_fetched_tokens: int
    prefill_worker: str
    decode_worker: str
    """Empty if the request ended with its first token."""
    transport: str
    kv_bytes: int
    num_attempts: int
    num_migrations: int
    num_local_prefill_tokens: int
    estimate: Estimate | None
    """What placement expected of the attempt that sent the first token."""
    num_accepted_drafts: int = 0
    """Tokens of the output that the decode worker had drafted."""
    num_rejected_drafts: int = 0


class LogReader(Protocol):
    """Whom a log tells. Everything returns at once."""

    def on_news(self, index: int) -> None:
        """There is more in the log that the reader knows as `index`."""

    def check_lag(self, index: int) -> None:
        """Leave if too much of that log is unread."""


class OutputLog:
    """Filled by a request. It ends once, with a summary or an error."""

    __slots__ = ("_end", "_logprobs", "_prompt_logprobs", "_readers", "_text", "_text_ends", "_token_ids")

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._text = bytearray()
        """UTF-8."""
        self._text_ends = array("I")
        """Of each token: where its text ends in `_text`."""
        self._logprobs: list[TokenLogprobs] = []
        """Of each token, or nothing if nobody asked."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._end: Summary | PdServeError | None = None
        self._readers: list[tuple[LogReader, int]] = []

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens with log-probabilities so far."""
        return len(self._prompt_logprobs)

    @property
    def ended(self) -> bool:
        """Whether `finish` or `fail` was called."""
        return self._end is not None

    @property
    def summary(self) -> Summary | None:
        """Set if the output is complete."""
        return self._end if isinstance(self._end, Summary) else None

    @property
    def error(self) -> PdServeError | None:
        """Set if there will be no more because of it."""
        return self._end if isinstance(self._end, PdServeError) else None

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        lists = (*self._prompt_logprobs[:1], *self._logprobs[:1])
        per_token = LOGPROBS_NBYTES * (1 + max((len(entry.top) for entry in lists), default=0))
        plain = 8 * len(self._token_ids) + len(self._text)
        return plain + per_token * (len(self._prompt_logprobs) + len(self._logprobs))

    def delta(self, begin: int, end: int, prompt_begin: int | None = None) -> Delta:
        """Tokens `begin` to `end`, which must be there, and what is known of the prompt from its entry `prompt_begin`
        on; None: nothing of that."""
        return Delta(
            self._token_ids[begin:end].tolist(),
            self.text(begin, end),
            self._logprobs[begin:end] if self._logprobs else (),
            self._prompt_logprobs[prompt_begin:] if prompt_begin is not None else (),
        )

    def text(self, begin: int, end: int) -> str:
        """That of tokens `begin` to `end`, which must be there."""
        ends = self._text_ends
        return self._text[ends[begin - 1] if begin else 0 : ends[end - 1] if end else 0].decode()

    def push_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Log-probabilities of further tokens of the prompt."""
        assert self._end is None, "log-probabilities after the end"
        if logprobs:
            self._prompt_logprobs.extend(logprobs)
            self._tell()

    def push(self, token_ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """More output: tokens, the text that is certain with each, and the log-probabilities of each if asked for."""
        assert self._end is None, "output after the end"
        assert len(token_ids) == len(texts), "text belongs to tokens"
        if not token_ids:
            return
        self._token_ids.extend(token_ids)
        for text in texts:
            self._text += text.encode()
            self._text_ends.append(len(self._text))
        self._logprobs.extend(logprobs)
        self._tell()

    def push_token(self, token_id: int, text: str) -> None:
        """As `push` of one token without log-probabilities."""
        assert self._end is None, "output after the end"
        self._token_ids.append(token_id)
        if text:
            self._text += text.encode()
        self._text_ends.append(len(self._text))
        for reader, index in self._readers:
            reader.on_news(index)

    def finish(self, summary: Summary) -> None:
        """The output is complete."""
        assert self._end is None, "ended twice"
        self._end = summary
        self._tell()

    def fail(self, error: PdServeError) -> None:
        """There will be no more, because of `error`. What there is can still be read."""
        assert self._end is None, "ended twice"
        # Without the frames that the original was raised through, which would live as long as the log.
        self._end = copy.copy(error)
        self._tell()

    def attach(self, reader: LogReader, index: int) -> None:
        """Tell `reader` of news, as that of log number `index`."""
        self._readers.append((reader, index))

    def detach(self, reader: LogReader) -> None:
        """Tell it no more."""
        self._readers = [(other, index) for other, index in self._readers if other is not reader]

    def check_readers(self) -> None:
        """Let those go that do not keep up."""
        for reader, index in tuple(self._readers):
            reader.check_lag(index)

    def _tell(self) -> None:
        for reader, index in self._readers:
            reader.on_news(index)
