"""Events that are written at once, without the task of their stream, are byte for byte those that the task would have
written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.errors import PdServeError
from pdserve.model.source import open_model
from pdserve.testing.router_rig import make_model
from pdserve.testing.summaries import summary
from pdserve.tokenizer import Tokenizer, load_tokenizer
from pdserve.types import FinishReason, SamplingParams, TokenLogprobs
from router.http.attendant import Attendant
from router.http.chunks import ChatChunks, CompletionChunks
from router.http.events import EventStream, MakeChunks
from router.http.plans import FieldNames, Plan
from router.output import Ending
from router.reader import Reader
from router.stream import OutputLog
from router.validation import CheckedRequest, GenerationSpec, TextInput

PIECES = ("the", " ", "", "é", "日本", '"quoted"', "\n", "\\", "\u2028", "\x00", "🌶", "</s>", "<tool")
SUMMARY = summary(9, Ending(FinishReason.STOP, stop_token_id=2), num_cached_tokens=1)


class Client:
    """Takes what is written to it, either way."""

    def __init__(self, *, writable: bool) -> None:
        self.writable = writable
        self.data = bytearray()
        self.num_sent = 0
        self.num_written = 0

    async def send(self, message: dict[str, Any]) -> None:
        """See Attendant."""
        self.num_sent += 1
        self.data += message.get("body", b"")

    def write(self, data: bytes) -> None:
        """See Attendant."""
        assert data
        self.num_written += 1
        self.data += data

    def keep_alive(self, beat: bytes) -> None:
        """See Attendant."""

    def stop_keep_alive(self) -> None:
        """See Attendant."""


class Kind:
    """A kind of stream."""

    def __init__(
        self,
        make: Callable[[bool], MakeChunks],
        *,
        num_outputs: int = 1,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        include_usage: bool = False,
        continuous_usage: bool = False,
        token_ids: bool = False,
        numbered: bool = False,
        score_only: bool = False,
    ) -> None:
        self.num_outputs = num_outputs
        self.num_logprobs = num_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs
        self.numbered = numbered
        self.make = make(token_ids)
        self.plan = Plan(
            request_id="r",
            prompts=(CHECKED,),
            num_choices=num_outputs,
            names=FieldNames(prompt="prompt"),
            stream=True,
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            token_ids=token_ids,
            score_only=score_only,
        )

    def spec(self) -> GenerationSpec:
        return GenerationSpec(
            prompt_ids=(5, 6, 7),
            sampling=SamplingParams(),
            max_tokens=100,
            min_tokens=0,
            stop_token_ids=(2,),
            stop_strings=(),
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )


CHECKED = CheckedRequest(
    prompt=TextInput("the prompt"),
    sampling=SamplingParams(),
    max_tokens=100,
    min_tokens=0,
    stop_token_ids=(),
    ignore_eos=False,
    stop_strings=(),
    num_logprobs=None,
    num_prompt_logprobs=None,
)


def chat(token_ids: bool) -> MakeChunks:
    return lambda tokenizer, choice: ChatChunks(tokenizer, choice, token_ids=token_ids)


def completion(token_ids: bool) -> MakeChunks:
    return lambda tokenizer, choice: CompletionChunks(tokenizer, choice, echo=False, token_ids=token_ids)


def echoed(token_ids: bool) -> MakeChunks:
    return lambda tokenizer, choice: CompletionChunks(tokenizer, choice, echo=True, token_ids=token_ids)


KINDS = {
    "chat": Kind(chat),
    "completion": Kind(completion),
    "echo": Kind(echoed),
    "usage": Kind(chat, include_usage=True),
    "continuous usage": Kind(completion, include_usage=True, continuous_usage=True),
    "several choices": Kind(chat, num_outputs=3, include_usage=True),
    "token ids": Kind(chat, token_ids=True),
    "log-probabilities": Kind(completion, num_logprobs=1),
    "log-probabilities of a chat": Kind(chat, num_logprobs=1),
    "log-probabilities of the prompt": Kind(echoed, num_logprobs=1, num_prompt_logprobs=1),
    "numbered": Kind(chat, numbered=True),
    "numbered choices": Kind(completion, numbered=True, num_outputs=2, include_usage=True),
    "nothing but the prompt": Kind(echoed, num_prompt_logprobs=1, num_logprobs=1, score_only=True),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(open_model(str(make_model(tmp_path_factory.mktemp("model")))))


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def bytes_of(kind: Kind, tokenizer: Tokenizer, client: Client, seed: int) -> bytes:
    """A random output, always the same for one seed, as `client` gets it."""
    rng = random.Random(seed)
    logs = [OutputLog() for _ in range(kind.num_outputs)]
    ask = SimpleNamespace(num_outputs=kind.num_outputs, prompts=(CHECKED,))
    generation = SimpleNamespace(ask=ask, specs=[kind.spec()] * kind.num_outputs, logs=logs, created=7)
    closings: list[PdServeError | None] = []
    reader = Reader(logs, (), max_unread=100, on_close=lambda _, reason: closings.append(reason))
    stream = EventStream(cast(Any, generation), kind.plan, tokenizer, kind.make, model="m", numbered=kind.numbered)
    sending = asyncio.create_task(stream.send(reader, cast(Attendant, client), (), 60.0))
    await settle()
    if kind.num_prompt_logprobs is not None:
        for log in logs:
            log.push_prompt([TokenLogprobs(6, -1.0, ((6, -1.0),)), TokenLogprobs(7, -2.0, ((7, -2.0),))])
        await settle()
    left = dict.fromkeys(range(len(logs)), 30)
    while left:
        for index in rng.sample(sorted(left), rng.randrange(1, len(left) + 1)):
            for _ in range(rng.choice((1, 1, 1, 2))):
                token, text = rng.randrange(5, 60), rng.choice(PIECES)
                if kind.num_logprobs is None and rng.random() < 0.8:
                    logs[index].push_token(token, text)
                else:
                    logprobs = [TokenLogprobs(token, -0.5, ((token, -0.5),))] if kind.num_logprobs is not None else []
                    logs[index].push([token], [text], logprobs)
            left[index] -= 1
            if not left[index]:
                del left[index]
                logs[index].finish(SUMMARY)
        await settle()
    await sending
    reader.close()
    return bytes(client.data)


@pytest.mark.parametrize("name", KINDS)
async def test_what_is_written_at_once_is_what_the_task_would_have_written(name: str, tokenizer: Tokenizer) -> None:
    for seed in range(3):
        direct, by_task = Client(writable=True), Client(writable=False)
        written = await bytes_of(KINDS[name], tokenizer, direct, seed)
        assert written == await bytes_of(KINDS[name], tokenizer, by_task, seed)
        assert written.endswith(b"data: [DONE]\n\n")
        assert by_task.num_written == 0
        # The head, what is there before the first token, the ends, and a token or two that came with one of them.
        assert direct.num_sent <= 4 + KINDS[name].num_outputs
        assert direct.num_written > 0 or KINDS[name].plan.score_only


async def test_a_client_that_stops_reading_and_goes_on_gets_the_same(tokenizer: Tokenizer) -> None:
    class Moody(Client):
        """Cannot be written to at every third time."""

        def __init__(self) -> None:
            self._num_asked = 0
            super().__init__(writable=True)

        @property
        def writable(self) -> bool:
            self._num_asked += 1
            return self._num_asked % 3 != 0

        @writable.setter
        def writable(self, value: bool) -> None: ...

    for name in ("chat", "several choices", "numbered"):
        moody = Moody()
        expected = await bytes_of(KINDS[name], tokenizer, Client(writable=False), 1)
        assert await bytes_of(KINDS[name], tokenizer, moody, 1) == expected
        assert moody.num_written > 5 and moody.num_sent > 5


async def test_an_error_in_what_makes_the_events_ends_the_stream_with_one(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ChatChunks):
        """Finds a bug in the third token."""

        num_left = 3

        def more(self, delta: Any) -> Any:
            self.num_left -= 1
            if not self.num_left:
                raise RuntimeError("a bug")
            return super().more(delta)

    kind = Kind(lambda token_ids: lambda t, choice: Broken(t, choice, token_ids=True))
    client = Client(writable=True)
    data = await bytes_of(kind, tokenizer, client, 0)
    assert b"internal error in request r" in data.rsplit(b"data: ", 1)[1]
    assert "a bug" in caplog.text
