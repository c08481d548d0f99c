"""Calls to prefill and decode workers as a router or a worker would make them that has lost its mind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import grpc

from kv_transfer.codec import prefix_request_to_proto, replies_from_proto, request_to_proto
from kv_transfer.control_stream import CONTROL, reply_from_wire, seal
from kv_transfer.messages import Abort, Commit, Endpoint, Grant, LinkHello, PrefixRequest, Quiet, Renew, Reserve
from kv_transfer.plan import ChunkPlan
from kv_transfer.transports.grpc_raw import PUSH
from kv_transfer.wire import encode
from pdserve.errors import PdServeError
from pdserve.rpc.codec import holder_to_proto, job_to_proto, target_to_proto
from pdserve.rpc.v1 import handoff_pb2, prefix_pb2
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.fuzz_calls import Script, problem
from pdserve.testing.fuzz_protobuf import M, MessageFuzzer
from pdserve.testing.fuzz_values import damaged, odd_int, odd_text
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, PrefixHolder, SamplingParams
from pdserve.worker_info import WorkerInfo

P_SERVICE: Final = "/pdserve.rpc.v1.PrefillWorker"
D_SERVICE: Final = "/pdserve.rpc.v1.DecodeWorker"
FETCH: Final = "/pdserve.rpc.v1.PrefixStore/Fetch"
CHUNK_NBYTES: Final = 4096
UNREADABLE: Final = b"\x0f"
"""Field 1 with wire type 7, which there is not."""
_VOCAB: Final = 250


class WorkerScripts:
    """Of one cluster with one worker of each kind."""

    def __init__(self, rng: Random, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        self._rng = rng
        self._fuzzer = MessageFuzzer(rng)
        self._prefill = prefill
        self._decode = decode
        self._numbers = itertools.count(1)

    # Sessions.

    def prefill_session(self) -> Script:
        """Jobs and cancels after a hello that is mostly good."""
        job = self._job()
        submit = pb.PrefillJob(
            job=job_to_proto(job),
            decode=[target_to_proto(self._target())],
            prefix_holders=[holder_to_proto(self._holder())],
        )
        cancel = pb.CancelJob(request_id=job.request_id, attempt=job.attempt)
        samples = [pb.PrefillCommand(submit=submit)] * 4 + [pb.PrefillCommand(cancel=cancel)]
        hello = pb.PrefillCommand(hello=pb.RouterHello(router_id=job.router_id))
        return self._session(f"{P_SERVICE}/Session", hello, samples)

    def decode_session(self) -> Script:
        """The same, with prompts that it is to compute itself and streams that are to move."""
        job = self._job()
        ids = {"request_id": job.request_id, "attempt": job.attempt}
        samples = [
            *[pb.DecodeCommand(submit=job_to_proto(job))] * 4,
            pb.DecodeCommand(cancel=pb.CancelJob(**ids)),  # type: ignore[arg-type]
            pb.DecodeCommand(
                migrate=pb.Migrate(**ids, new_attempt=2, target=target_to_proto(self._target()))  # type: ignore[arg-type]
            ),
        ]
        hello = pb.DecodeCommand(hello=pb.RouterHello(router_id=job.router_id))
        return self._session(f"{D_SERVICE}/Session", hello, samples)

    def _session(self, path: str, hello: M, samples: Sequence[M]) -> Script:
        rng, fuzzer = self._rng, self._fuzzer
        first = hello if rng.random() < 0.9 else fuzzer.altered(hello)
        rest = [fuzzer.wire(fuzzer.likely(samples)) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
        pause_s = rng.choice((0.0, 0.0, 0.02, 0.1))
        return Script(path=path, messages=(first.SerializeToString(), *rest), pause_s=pause_s)

    # Calls without streams.

    def unary(self) -> Script:
        """Statistics, prefixes, and a drain that cannot be read, so that the workers go on."""
        rng, fuzzer = self._rng, self._fuzzer
        service = rng.choice((P_SERVICE, D_SERVICE))
        match rng.randrange(4):
            case 0:
                return Script(path=f"{service}/GetStats", messages=(rng.randbytes(rng.randrange(20)),))
            case 1:
                return Script(path=f"{service}/Drain", messages=(UNREADABLE + rng.randbytes(rng.randrange(20)),))
            case _:
                sample = prefix_request_to_proto(
                    PrefixRequest(
                        id=self._id(),
                        requester=self._peer(),
                        names=(rng.randbytes(16), rng.randbytes(16)),
                        timeout_s=0.2,
                    )
                )
                message: prefix_pb2.FetchRequest = fuzzer.likely([sample])
                # It may hold the caller for as long as the caller says.
                return Script(path=FETCH, messages=(fuzzer.wire(message),), may_wait=True)

    # Hand-offs.

    def control(self) -> Script:
        """A link to a decode worker, its messages altered, repeated and out of order."""
        rng, fuzzer = self._rng, self._fuzzer
        hello, reserve, _ = self._handoff()
        nonce = rng.choice((0, 1, rng.getrandbits(63)))
        ids = reserve.id
        samples = [
            request_to_proto(message)
            for message in (
                *(reserve, reserve),
                *(Commit(ids, nonce, (7,)), Renew(ids, nonce), Abort(ids, nonce), Quiet(ids, nonce)),
            )
        ]
        first = request_to_proto(hello)
        first = first if rng.random() < 0.5 else fuzzer.altered(first)
        rest = [fuzzer.likely(samples) for _ in range(rng.choice((0, 1, 2, 4)))]
        messages = [seal(message) for message in (first, *rest)]
        if rng.random() < 0.2:
            place = rng.randrange(len(messages))
            messages[place] = damaged(messages[place], rng)
        return Script(path=CONTROL, messages=tuple(messages), pause_s=rng.choice((0.0, 0.02)))

    def push(self) -> Script:
        """Chunks, or what looks like some, for a link that there is not."""
        rng = self._rng
        frames = tuple(rng.randbytes(rng.choice((0, 1, 63, 64, 200))) for _ in range(rng.randint(1, 3)))
        named = (
            ("pdserve-prefill-incarnation", rng.choice(("x", self._prefill.incarnation))),
            ("pdserve-link-generation", rng.choice(("1", "0", "-1", "99999999999999999999", "x"))),
        )
        return Script(path=PUSH, messages=frames, metadata=named if rng.random() < 0.7 else ())

    async def hand_off(self, channel: grpc.aio.Channel) -> str:
        """A whole hand-off whose chunks, or last message, are altered. Empty, or what is wrong with the answer."""
        rng = self._rng
        hello, reserve, plan = self._handoff()
        said: asyncio.Queue[bytes | None] = asyncio.Queue()
        pushed: asyncio.Queue[bytes | None] = asyncio.Queue()
        link: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(CONTROL)(_all(said))
        push: grpc.aio.StreamUnaryCall[bytes, bytes] = channel.stream_unary(PUSH)(
            _all(pushed),
            metadata=(
                ("pdserve-prefill-incarnation", hello.prefill.incarnation),
                ("pdserve-link-generation", str(hello.generation)),
            ),
        )
        try:
            said.put_nowait(seal(request_to_proto(hello)))
            said.put_nowait(seal(request_to_proto(reserve)))
            grant = await _grant(link)
            if grant is None:
                return ""
            for seq in range(plan.num_chunks):
                pushed.put_nowait(self._frame(plan, grant.nonce, seq))
            pushed.put_nowait(None)
            await push.code()
            commit = request_to_proto(Commit(reserve.id, grant.nonce, (7,)))
            said.put_nowait(seal(commit if rng.random() < 0.5 else self._fuzzer.altered(commit)))
            said.put_nowait(None)
            # The status comes after all messages, and only to those who read them.
            while await link.read() is not grpc.aio.EOF:
                continue
            return problem(await link.code(), await link.details() or "", "a hand-off")
        except grpc.aio.AioRpcError:
            # The worker has ended the link, which it may.
            return ""
        finally:
            for queue in (said, pushed):
                queue.put_nowait(None)
            push.cancel()
            link.cancel()

    def _frame(self, plan: ChunkPlan, nonce: int, seq: int) -> bytes:
        """A chunk of zeros; every other one is wrong in some way that its checksum does not show, or is damaged."""
        rng = self._rng
        header = plan.header(seq, nonce=nonce, attempt=1)
        if rng.random() < 0.3:
            name = rng.choice(("attempt", "seq", "layer_begin", "layer_end", "token_begin", "token_end", "head_end"))
            high = 2**16 - 1 if name in ("layer_begin", "layer_end", "head_end") else 2**32 - 1
            changed: dict[str, Any] = {name: odd_int(rng, 0, high)}
            header = replace(header, **changed)
        if rng.random() < 0.1:
            header = replace(header, payload_nbytes=rng.choice((0, 1, header.payload_nbytes - 1)))
        frame = encode(header, [memoryview(bytes(header.payload_nbytes))]).join()
        return damaged(frame, rng) if rng.random() < 0.3 else frame

    def _handoff(self) -> tuple[LinkHello, Reserve, ChunkPlan]:
        tokens = self._rng.choice((5, 16, 40))
        hello = LinkHello(
            prefill=self._peer(),
            generation=1,
            decode_incarnation=self._decode.incarnation,
            target_chunk_bytes=CHUNK_NBYTES,
            tail_tokens=0,
            offers=(Endpoint("grpc"),),
        )
        plan = ChunkPlan.make(tokens, self._prefill.kv_layout, CHUNK_NBYTES)
        job = replace(self._job(), token_ids=tuple(range(tokens)), num_prompt_tokens=tokens)
        reserve = Reserve(
            id=HandoffId(job.request_id, job.attempt), job=job, num_tokens=tokens, plan_hash=plan.plan_hash
        )
        return hello, reserve, plan

    def _peer(self) -> WorkerInfo:
        """A prefill worker that nobody has seen before."""
        number = next(self._numbers)
        return replace(self._prefill, worker_id=f"p{number % 10}", incarnation=f"fuzz-{number}")

    def _target(self) -> DecodeTarget:
        return self._decode.target

    def _holder(self) -> PrefixHolder:
        info = self._decode
        return PrefixHolder(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address, num_tokens=16)

    def _id(self) -> HandoffId:
        return HandoffId(f"fuzz-{next(self._numbers)}", 1)

    def _job(self) -> GenerationJob:
        rng = self._rng
        prompt = tuple(rng.randrange(_VOCAB) for _ in range(rng.choice((1, 5, 17, 40))))
        return GenerationJob(
            request_id=f"fuzz-{next(self._numbers)}",
            attempt=1,
            router_id=f"fuzz-router-{next(self._numbers)}" if rng.random() < 0.9 else odd_text(rng) or "x",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_new_tokens=rng.choice((1, 2, 5)),
            sampling=SamplingParams(temperature=0.0),
        )


async def _all(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[Any]:
    while (data := await queue.get()) is not None:
        yield data


async def _grant(link: grpc.aio.StreamStreamCall[bytes, bytes]) -> Grant | None:
    """None if the worker says anything else than that there is room."""
    while (data := await link.read()) is not grpc.aio.EOF:
        assert isinstance(data, bytes), "no end"
        message: handoff_pb2.HandoffReply = reply_from_wire(data)
        if message.WhichOneof("message") == "welcome":
            continue
        with contextlib.suppress(PdServeError):
            found = next((reply for reply in replies_from_proto(message) if isinstance(reply, Grant)), None)
            if found is not None:
                return found
        return None
    return None
