"""Clients that lose the connection and come back over gRPC: cursors, names that stand for one request, what is kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.errors import PdServeError
from pdserve.lifecycle import RequestState
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.router_rig import (
    EOS,
    PROMPT,
    RouterClient,
    RouterRig,
    RouterRigs,
    ask,
    expected,
    make_model,
)
from pdserve.testing.waiting import eventually
from router.prompts import Prompts

TEXT = "ok🌶 né <st> end"
"""Characters of several tokens, and a beginning of a stop string that comes to nothing."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


class Got:
    """What a client has of a request, over any number of calls."""

    def __init__(self, num_outputs: int = 1) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_outputs)]
        self.texts = [""] * num_outputs
        self.logprobs: list[list[float]] = [[] for _ in range(num_outputs)]
        self.prompt_logprobs: list[list[int]] = [[] for _ in range(num_outputs)]
        self.ends: list[list[tuple[Any, ...]]] = [[] for _ in range(num_outputs)]

    @property
    def cursor(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def add(self, response: pb.GenerateResponse) -> None:
        i = response.index
        self.tokens[i] += response.token_ids
        self.texts[i] += response.text_delta
        self.logprobs[i] += response.logprobs.logprobs
        self.prompt_logprobs[i] += response.prompt_logprobs.token_ids
        assert response.num_tokens == len(self.tokens[i])
        if response.finish_reason:
            end = (response.finish_reason, response.stop_string, response.stop_token_id)
            place = pb.Placement()
            place.CopyFrom(response.placement)
            for name in pb.Placement.DESCRIPTOR.fields_by_name:
                # What the router expects changes with every request that it sees.
                if "predicted" in name or name == "other_ttft_ms":
                    place.ClearField(name)  # type: ignore[arg-type]
            self.ends[i].append((*end, str(response.usage), str(place)))

    def before_another_call(self) -> None:
        """Each call has the ends of all outputs, and what is known of the prompt if the client has no token yet."""
        self.ends = [[] for _ in self.ends]
        self.prompt_logprobs = [
            scores if tokens else [] for scores, tokens in zip(self.prompt_logprobs, self.tokens, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Got) and vars(self) == vars(other)


async def read_all(client: RouterClient, call: Any, got: Got) -> Got:
    """Read to the end. Raises what the request ended with."""
    seqs = []
    try:
        async for response in call:
            got.add(response)
            seqs.append(response.seq)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error
    assert seqs == list(range(len(seqs)))
    return got


async def attach(client: RouterClient, name: str, got: Got | None = None, num_outputs: int = 1) -> Got:
    got = got or Got(num_outputs)
    got.before_another_call()
    call = client.inference.Attach(pb.AttachRequest(request_id=name, received_tokens=got.cursor), timeout=20.0)
    return await read_all(client, call, got)


async def attach_error(client: RouterClient, name: str, received: Sequence[int] = ()) -> PdServeError:
    call = client.inference.Attach(pb.AttachRequest(request_id=name, received_tokens=received), timeout=20.0)
    try:
        await read_all(client, call, Got(8))
    except PdServeError as error:
        return error
    raise AssertionError("it succeeded")


async def read_tokens(call: Any, got: Got, num_tokens: int) -> None:
    """Until there are so many tokens, of all outputs together."""
    while sum(got.cursor) < num_tokens:
        got.add(await call.read())


async def read_ids(call: Any) -> list[int]:
    """Of the next response."""
    response: pb.GenerateResponse = await call.read()
    return list(response.token_ids)


def resumable(max_tokens: int = 12, **fields: Any) -> pb.GenerateRequest:
    return ask(max_tokens, resumable=True, **fields)


@contextlib.asynccontextmanager
async def writing(rigs: RouterRigs, **router: Any) -> AsyncIterator[RouterRig]:
    """Workers that write TEXT."""
    async with rigs.start() as rig:
        script = list((await rig.client.inference.Tokenize(pb.TokenizeRequest(text=TEXT))).token_ids)
    script.append(EOS)
    async with rigs.start(next_token=lambda ids: script[len(ids) - len(PROMPT)], **router) as rig:
        yield rig


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("stop", [(), ("<stop>",), ("né",), ("d",)])
async def test_a_client_that_is_cut_at_any_token_continues_there_and_misses_nothing(
    rigs: RouterRigs, num_outputs: int, stop: tuple[str, ...]
) -> None:
    async with writing(rigs) as rig:
        fields: dict[str, Any] = {"stop": common_pb2.StopParams(max_tokens=60, stop=stop), "n": num_outputs}
        fields |= {"logprobs": 2, "prompt_logprobs": 1, "resumable": True}
        decode = rig.fleet.decode["d0"]
        call = rig.client.inference.Generate(ask(request_id="whole", **fields), timeout=20.0)
        whole = await read_all(rig.client, call, Got(num_outputs))
        assert whole.prompt_logprobs == [list(PROMPT[1:])] * num_outputs
        assert [len(scores) for scores in whole.logprobs] == whole.cursor
        assert [len(ends) for ends in whole.ends] == [1] * num_outputs
        whole_text = whole.texts[0]
        assert whole_text == (TEXT.partition(stop[0])[0] if stop and stop[0] in TEXT else TEXT)
        num_tokens = sum(whole.cursor)
        for cut in range(num_tokens + 1):
            # Of all outputs together; first tokens come from the prefill worker.
            decode.before_step.let_pass(max(0, cut - num_outputs))
            name = f"cut-at-{cut}"
            call = rig.client.inference.Generate(ask(request_id=name, **fields), timeout=20.0)
            got = Got(num_outputs)
            await rig.wait_state(name, *RequestState)
            await read_tokens(call, got, cut)
            call.cancel()
            decode.before_step.release()
            assert vars(await attach(rig.client, name, got)) == vars(whole)


async def test_every_cursor_can_be_continued_from_after_the_end(rigs: RouterRigs) -> None:
    async with writing(rigs) as rig:
        await rig.client.generate(ask(60, request_id="x", logprobs=0))
        whole = await attach(rig.client, "x")
        (ids,) = whole.tokens
        for received in range(len(ids) + 1):
            call = rig.client.inference.Attach(
                pb.AttachRequest(request_id="x", received_tokens=[received]), timeout=20.0
            )
            (response,) = [response async for response in call]
            assert list(response.token_ids) == ids[received:]
            assert len(response.logprobs.logprobs) == len(ids) - received
            assert response.finish_reason == common_pb2.FINISH_REASON_STOP
            assert whole.texts[0].endswith(response.text_delta)
            prefix = whole.texts[0].removesuffix(response.text_delta)
            # Text that is certain: of a prefix of the tokens without half a character at its end.
            text = (await rig.client.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids[:received]))).text
            assert prefix == text.removesuffix("</s>").rstrip("�")


async def test_several_clients_read_one_request_and_it_goes_on_while_one_is_left(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(2)
        first, got_first = rig.client.inference.Generate(ask(20, request_id="x"), timeout=20.0), Got()
        await read_tokens(first, got_first, 3)
        second = rig.client.inference.Attach(pb.AttachRequest(request_id="x", received_tokens=[1]), timeout=20.0)
        got_third = Got()
        third = asyncio.create_task(attach(rig.client, "x", got_third))
        assert await read_ids(second) == expected(3)[1:]
        await eventually(lambda: got_third.cursor == [3], "the third one reads")
        first.cancel()
        second.cancel()
        await eventually(lambda: decode.before_step.num_waiting == 1, "the next token waits")
        assert (await rig.client.state_of("x")) == "DECODING"
        decode.before_step.release()
        await third
        assert got_third.tokens == [expected(20)]
        assert decode.cancelled == []
        await rig.wait_state("x", "FINISHED")


async def test_a_request_that_nobody_reads_any_more_is_cancelled_at_once_unless_it_is_resumable(
    rigs: RouterRigs,
) -> None:
    """O-ABT-1."""
    async with rigs.start(resume_s=0.5) as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        calls = {
            name: rig.client.inference.Generate(ask(20, request_id=name, resumable=name == "r"), timeout=20.0)
            for name in "pr"
        }
        for call in calls.values():
            await read_tokens(call, Got(), 1)
        for name in "pr":
            await rig.wait_state(name, "DECODING")
        for call in calls.values():
            call.cancel()
        await rig.wait_state("p", "CANCELLED")
        assert await rig.client.state_of("r") == "DECODING"
        # Whoever comes back in time starts the clock anew when it leaves.
        again = rig.client.inference.Attach(pb.AttachRequest(request_id="r", received_tokens=[0]), timeout=20.0)
        await read_tokens(again, Got(), 1)
        again.cancel()
        await rig.wait_state("r", "CANCELLED")
        await eventually(lambda: {("p", 1), ("r", 1)} <= set(decode.cancelled), "the worker was told")
        await rig.wait_quiet()
        error = await attach_error(rig.client, "r")
        assert (error.code, error.message) == ("cancelled", "the client has gone")


async def test_a_resumable_request_ends_without_a_reader_and_is_there_for_the_one_that_comes_back(
    rigs: RouterRigs,
) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_start.hold()
        call = rig.client.inference.Generate(resumable(9, request_id="x"), timeout=20.0)
        await eventually(lambda: prefill.before_start.num_waiting == 1, "it is dispatched")
        call.cancel()
        prefill.before_start.release()
        await rig.wait_state("x", "FINISHED")
        assert (await attach(rig.client, "x")).tokens == [expected(9)]


async def test_the_same_request_again_is_not_generated_again(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        prefill = rig.fleet.prefill["p0"]
        prefill.before_first_token.hold()
        request = ask(8, request_id="x", sampling=common_pb2.SamplingParams())
        running = [asyncio.create_task(rig.client.generate(request)) for _ in range(3)]
        await eventually(lambda: prefill.before_first_token.num_waiting == 1, "it waits")
        prefill.before_first_token.release()
        answers = [*await asyncio.gather(*running), await rig.client.generate(request)]
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(expected(8))}
        assert len({str(answer.last.placement) + str(answer.last.timings) for answer in answers}) == 1
        assert len(prefill.jobs) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": (60,)},
        {"max_tokens": 9},
        {"n": 2},
        {"resumable": True},
        {"cache_salt": "x"},
        {"priority": 1},
        {"sampling": common_pb2.SamplingParams(temperature=0.5)},
        {"model": "tiny"},
        {"logprobs": 0},
    ],
)
async def test_another_request_of_the_same_name_is_refused_while_the_first_runs_and_after(
    rigs: RouterRigs, other: dict[str, Any]
) -> None:
    async with rigs.start() as rig:
        rig.fleet.prefill["p0"].before_start.hold()
        running = asyncio.create_task(rig.client.generate(ask(request_id="x")))
        await rig.wait_state("x", "QUEUED")
        for _ in range(2):
            error = await rig.client.error(ask(**({"max_tokens": 8} | other), request_id="x"))
            assert (error.code, error.field) == ("already_exists", "request_id")
            rig.fleet.prefill["p0"].before_start.release()
            assert (await running).token_ids == expected(8)


async def test_a_request_that_was_refused_leaves_its_name_free(rigs: RouterRigs) -> None:
    async with rigs.start(max_active_requests=1) as rig:
        wrong = [
            ask(0, request_id="x"),
            ask(8, (50,) * 70_000, request_id="x"),
            ask(text="", request_id="x"),
            ask(8, request_id="x", n=2),
        ]
        codes = [(await rig.client.error(request)).code for request in wrong]
        assert codes == ["invalid_request", "prompt_too_long", "invalid_request", "no_capacity"]
        assert (await attach_error(rig.client, "x")).code == "not_found"
        assert (await rig.client.generate(ask(8, request_id="x"))).token_ids == expected(8)


@pytest.mark.parametrize("num_outputs", [1, 3])
async def test_a_request_that_found_no_worker_may_come_again_under_its_name(rigs: RouterRigs, num_outputs: int) -> None:
    async with rigs.start(prefill=0, worker_wait_s=0.2) as rig:
        request = ask(8, request_id="x", n=num_outputs)
        assert (await rig.client.error(request)).code == "unavailable"
        assert (await attach_error(rig.client, "x")).code == "not_found"
        await rig.fleet.add_prefill("p0")
        await rig.wait_ready(2)
        await rig.wait_state("x", "FAILED")
        assert (await rig.client.generate(request)).last.num_tokens == 8
        await rig.wait_state("x", "FINISHED")
        assert (await rig.client.error(ask(7, request_id="x"))).code == "already_exists"


async def test_a_failure_is_the_result_of_its_request(rigs: RouterRigs) -> None:
    async with rigs.start(max_attempts=1) as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.let_pass(2)
        call, got = rig.client.inference.Generate(ask(9, request_id="x"), timeout=20.0), Got()
        await read_tokens(call, got, 3)
        await rig.fleet.kill("d0")
        await rig.wait_state("x", "FAILED")
        for error in (await attach_error(rig.client, "x"), await rig.client.error(ask(9, request_id="x"))):
            assert error.code == "worker_lost"
        again = rig.client.inference.Attach(pb.AttachRequest(request_id="x", received_tokens=[1]), timeout=20.0)
        assert await read_ids(again) == expected(3)[1:]
        with pytest.raises(grpc.aio.AioRpcError):
            await again.read()


async def test_results_are_kept_for_a_while_and_the_oldest_go_first(rigs: RouterRigs) -> None:
    async with rigs.start(retain_requests=2) as rig:
        for name in "abc":
            await rig.client.generate(ask(4, request_id=name))
        assert (await attach(rig.client, "c")).tokens == (await attach(rig.client, "b")).tokens == [expected(4)]
        gone = await attach_error(rig.client, "a")
        assert gone.code == "not_found"
        assert "router.retain_requests" in gone.message
        # Its record is still there.
        await rig.wait_state("a", "FINISHED")
        assert (await rig.client.error(ask(4, request_id="a"))).code == "already_exists"
    bounds: list[dict[str, Any]] = [{"retain_s": 0.2}, {"retain_bytes": 100}, {"retain_s": 0}, {"retain_requests": 0}]
    for number, settings in enumerate(bounds):
        async with rigs.start(**settings) as rig:
            name = f"x{number}"
            await rig.client.generate(ask(4, request_id=name))

            async def gone_by_itself(name: str = name, rig: RouterRig = rig) -> bool:
                call = rig.client.inference.Attach(pb.AttachRequest(request_id=name), timeout=20.0)
                try:
                    await read_all(rig.client, call, Got())
                except PdServeError as error:
                    return error.code == "not_found"
                return False

            await eventually(gone_by_itself, "it is forgotten")


async def test_what_cannot_be_attached_to_says_why(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, rigs.router() as (_, other):
        await eventually(lambda: rig.fleet.prefill["p0"].num_sessions == 2, "both are connected")
        await rig.client.generate(ask(4, request_id="one"))
        await rig.client.generate(ask(4, request_id="two", n=2))
        for name in ("one", "two"):
            await rig.wait_state(name, "FINISHED")

            async def written(name: str = name) -> bool:
                return await other.state_of(name) == "FINISHED"

            await eventually(written, "the other router knows")
            wrong = await attach_error(other, name)
            assert (wrong.code, wrong.field) == ("wrong_router", "request_id")
            assert rig.router.router_id in wrong.message
            assert wrong.details["router"] == rig.router.router_id
        for received, field in [
            ((5,), "received_tokens[0]"),
            ((-1,), "received_tokens[0]"),
            ((0, 0), "received_tokens"),
        ]:
            beyond = await attach_error(rig.client, "one", received)
            assert (beyond.code, beyond.field) == ("invalid_request", field)
        for name, code in (("never", "not_found"), ("", "invalid_request"), ("n o", "invalid_request")):
            assert (await attach_error(rig.client, name)).code == code


async def test_several_outputs_have_one_name_for_all_and_one_for_each(rigs: RouterRigs) -> None:
    async with rigs.start(seeded=True) as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        sampling = common_pb2.SamplingParams(seed=7)
        call = rig.client.inference.Generate(ask(6, request_id="x", n=3, sampling=sampling), timeout=20.0)
        got = Got(3)
        await read_tokens(call, got, 3)
        await rig.wait_state("x", "DECODING")
        info = await rig.client.info_of("x")
        assert info is not None
        assert (info.request_id, info.prompt_tokens, info.completion_tokens) == ("x", 3, 3)
        one = await rig.client.info_of("x-1")
        assert one is not None
        assert (one.request_id, one.prompt_tokens, one.completion_tokens) == ("x-1", 3, 1)
        decode.before_step.release()
        await read_tokens(call, got, 18)
        assert got.tokens == [expected(6, seed=7 + i) for i in range(3)]
        await rig.wait_state("x", "FINISHED")
        await rig.wait_state("x-2", "FINISHED")
        info = await rig.client.info_of("x")
        assert info is not None
        assert (info.state, info.prompt_tokens, info.completion_tokens) == ("FINISHED", 3, 18)


async def test_the_name_for_all_outputs_is_taken_at_every_router(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, rigs.router() as (_, other):
        await eventually(lambda: rig.fleet.prefill["p0"].num_sessions == 2, "both are connected")
        rig.fleet.decode["d0"].before_step.hold()
        running = [
            asyncio.create_task(rig.client.generate(ask(4, request_id="one"))),
            asyncio.create_task(rig.client.generate(ask(4, request_id="two", n=2))),
        ]
        for name in ("one", "two"):
            await rig.wait_tokens(name, 1)
        for name, num_outputs in (("one", 2), ("two", 1), ("two", 3)):
            error = await other.error(ask(4, request_id=name, n=num_outputs))
            assert (error.code, error.field) == ("already_exists", "request_id")

        async def known() -> bool:
            return await other.state_of("two") == "DECODING"

        await eventually(known, "the other router sees what the outputs do")
        rig.fleet.decode["d0"].before_step.release()
        await asyncio.gather(*running)
        for name, num_outputs in (("one", 2), ("two", 1)):
            error = await other.error(ask(4, request_id=name, n=num_outputs))
            assert error.code == "already_exists"


@pytest.mark.parametrize("name", ["x", "x-1"])
async def test_cancelling_a_request_or_one_of_its_outputs_ends_all_of_them(rigs: RouterRigs, name: str) -> None:
    async with rigs.start() as rig:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        running = asyncio.create_task(rig.client.error(ask(9, request_id="x", n=3)))
        await rig.wait_tokens("x", 3)
        assert (await rig.client.inference.Cancel(pb.CancelRequest(request_id=name))).cancelled
        error = await running
        assert (error.code, error.message) == ("cancelled", f"request {name} was cancelled")
        for output in ("x", "x-0", "x-1", "x-2"):
            await rig.wait_state(output, "CANCELLED")
        assert not (await rig.client.inference.Cancel(pb.CancelRequest(request_id=name))).cancelled


async def test_an_output_that_fails_for_good_fails_the_request_and_frees_the_others(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2, max_attempts=1) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.hold()
        running = asyncio.create_task(rig.client.error(ask(9, request_id="x", n=2)))
        await rig.wait_tokens("x", 2)
        info = await rig.client.info_of("x")
        assert info is not None
        await rig.fleet.kill(info.decode_worker)
        assert (await running).code == "worker_lost"
        await rig.wait_state("x", "FAILED")
        await rig.wait_quiet()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"n": 2, "request_id": "x" * 127}, "request_id"),
    ],
)
async def test_what_is_out_of_range_is_named(rigs: RouterRigs, fields: dict[str, Any], field: str) -> None:
    """O-VAL-2."""
    async with rigs.start() as rig:
        error = await rig.client.error(ask(**fields))
        assert (error.code, error.field) == ("invalid_request", field)


async def test_priority_and_salt_reach_the_workers(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(2, cache_salt="mine", priority=-3))
        await rig.client.generate(ask(2))
        first, second = rig.fleet.prefill["p0"].jobs
        assert (first.cache_salt, first.priority) == ("mine", -3)
        assert (second.cache_salt, second.priority) == ("", 0)


async def test_text_may_have_the_stop_string_and_special_tokens(rigs: RouterRigs) -> None:
    def eos_in_the_middle(token_ids: Any) -> int:
        return EOS if len(token_ids) == 5 else 70

    async with rigs.start(next_token=eos_in_the_middle) as rig:
        plain = await rig.client.generate(ask(stop=common_pb2.StopParams(max_tokens=4, ignore_eos=True)))
        shown = await rig.client.generate(
            ask(stop=common_pb2.StopParams(max_tokens=4, ignore_eos=True), skip_special_tokens=False)
        )
        letter = plain.text[0]
        assert (plain.text, shown.text) == (letter * 3, f"{letter * 2}</s>{letter}")
        stop = common_pb2.StopParams(max_tokens=4, stop=[letter * 2])
        kept = await rig.client.generate(ask(stop=stop, include_stop_string=True))
        assert (kept.text, (await rig.client.generate(ask(stop=stop))).text) == (letter * 2, "")


async def test_a_router_that_stops_forgets_what_it_kept(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(4, request_id="x"))
        await rig.router.drain()
        assert (await attach_error(rig.client, "x")).code == "not_found"


async def test_a_client_that_leaves_before_anything_is_dispatched(
    rigs: RouterRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-ABT-2."""
    reached, go_on = asyncio.Semaphore(0), asyncio.Event()
    encode = Prompts.encode

    async def slow(self: Prompts, prompt: Any) -> Any:
        reached.release()
        await go_on.wait()
        return await encode(self, prompt)

    async with rigs.start() as rig:
        monkeypatch.setattr(Prompts, "encode", slow)
        for name in ("gone", "back"):
            call = rig.client.inference.Generate(ask(5, request_id=name, resumable=name == "back"), timeout=20.0)
            waiting = asyncio.create_task(call.read())
            await reached.acquire()
            call.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await rig.wait_state("gone", "")
        go_on.set()
        assert (await attach(rig.client, "back")).tokens == [expected(5)]
        assert [job.request_id for job in rig.fleet.prefill["p0"].jobs] == ["back"]
        # It had not come to anything, so its name is free.
        assert (await rig.client.generate(ask(4, request_id="gone"))).token_ids == expected(4)
