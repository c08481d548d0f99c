"""`vllm.grpc.engine.VllmEngine` in front of real workers: what its clients get is what ours get."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import json_format
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from pdserve.client import AsyncClient
from pdserve.errors import InvalidRequestError
from pdserve.rpc.errors import error_of
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.testing.waiting import eventually

PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(num_layers=2, hidden_size=64, intermediate_size=64, max_position_embeddings=512)
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny", shape=shape)


class Rig:
    """A client of theirs and one of ours."""

    def __init__(self, theirs: Any, ours: AsyncClient) -> None:
        self.theirs = theirs
        self.ours = ours

    async def generate(self, *, stream: bool = False, **fields: Any) -> list[vllm.GenerateResponse]:
        fields.setdefault("tokenized", {"input_ids": PROMPT})
        message = json_format.ParseDict({"stream": stream, **fields}, vllm.GenerateRequest())
        return [response async for response in self.theirs.Generate(message, timeout=60)]


@contextlib.asynccontextmanager
async def rig(redis_url: str, cluster_name: str, model: Path) -> AsyncIterator[Rig]:
    torch.set_num_threads(1)
    config = test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        kv={"num_blocks": 256},
        router={"listen": "127.0.0.1:0", "vllm_grpc": True},
    )
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        address = cluster.router.address
        async with grpc.aio.insecure_channel(address) as channel, AsyncClient(address, timeout_s=60) as ours:
            yield Rig(vllm_grpc.VllmEngineStub(channel), ours)


async def test_outputs_are_ours_streamed_or_not(redis_url: str, cluster_name: str, model: Path) -> None:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True, "n": 2, "logprobs": 2, "top_k": 50}
    async with rig(redis_url, cluster_name, model) as it:
        same = await it.ours.generate(token_ids=PROMPT, **params)
        whole = await it.generate(sampling_params=params)
        streamed = await it.generate(sampling_params=params, stream=True)
        ends = {r.complete.index: r.complete for r in streamed if r.HasField("complete")}
        assert sorted((r.complete for r in whole), key=lambda c: c.index) == [ends[0], ends[1]]
        assert len(streamed) > 4
        for i, expected in enumerate(same.outputs):
            chunks = [r.chunk for r in streamed if r.HasField("chunk") and r.chunk.index == i]
            assert [t for chunk in chunks for t in chunk.token_ids] == list(expected.token_ids)
            assert chunks[-1].completion_tokens == 12
            assert {chunk.prompt_tokens for chunk in chunks} == {len(PROMPT)}
            assert list(ends[i].output_ids) == list(expected.token_ids)
            assert (ends[i].finish_reason, ends[i].prompt_tokens, ends[i].completion_tokens) == ("length", 40, 12)
            for source in (ends[i].output_logprobs, chunks[0].output_logprobs):
                for at, (value, top) in enumerate(zip(source.token_logprobs, source.top_logprobs, strict=True)):
                    assert value == pytest.approx(expected.logprobs[at].logprob, abs=1e-5)
                    assert list(top.token_ids) == [token_id for token_id, _ in expected.logprobs[at].top]
                    assert len(top.values) == 2


async def test_ends_grammars_and_defaults(redis_url: str, cluster_name: str, model: Path) -> None:
    async with rig(redis_url, cluster_name, model) as it:
        greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        (plain,) = await it.generate(sampling_params=greedy)
        stop_id = plain.complete.output_ids[4]
        (stopped,) = await it.generate(sampling_params={**greedy, "stop_token_ids": [stop_id]})
        assert (stopped.complete.finish_reason, stopped.complete.matched_token_id) == ("stop", stop_id)
        assert list(stopped.complete.output_ids) == list(
            plain.complete.output_ids[: 1 + [*plain.complete.output_ids].index(stop_id)]
        )
        for constraint, texts in (
            ({"regex": "(ab|cd)!"}, ("ab!", "cd!")),
            ({"choice": {"choices": ["red", "green"]}}, ("red", "green")),
            ({"json_schema": '{"enum": [1, 2]}'}, ("1", "2")),
        ):
            params = {"temperature": 1.0, "max_tokens": 30, "skip_special_tokens": True, **constraint}
            (answer,) = await it.generate(sampling_params=params)
            assert await it.ours.detokenize(answer.complete.output_ids, skip_special_tokens=True) in texts
        text = (
            await it.generate(tokenized=None, text="Once upon", sampling_params={"temperature": 0.0, "max_tokens": 3})
        )[0]
        same = await it.ours.generate("Once upon", max_tokens=3, temperature=0)
        assert list(text.complete.output_ids) == list(same.token_ids)
        assert text.complete.prompt_tokens == same.usage.prompt_tokens


async def test_state_abort_and_what_is_refused(redis_url: str, cluster_name: str, model: Path) -> None:
    async with rig(redis_url, cluster_name, model) as it:

        async def healthy() -> bool:
            return bool((await it.theirs.HealthCheck(vllm.HealthCheckRequest())).healthy)

        await eventually(healthy, "healthy", 30)
        info = await it.theirs.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length, info.is_generation) == ("tiny", 512, True)
        assert info.vocab_size == (await it.ours.models())[0].vocab_size
        call = it.theirs.Generate(
            vllm.GenerateRequest(
                request_id="long",
                stream=True,
                tokenized=vllm.TokenizedInput(input_ids=PROMPT),
                sampling_params=vllm.SamplingParams(max_tokens=400, ignore_eos=True),
            )
        )
        await call.read()
        assert (await it.theirs.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 1
        await it.theirs.Abort(vllm.AbortRequest(request_ids=["long", "never"]))
        with pytest.raises(grpc.aio.AioRpcError) as aborted:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert aborted.value.code() is grpc.StatusCode.CANCELLED
        for fields, name in (
            ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
            ({"sampling_params": {"structural_tag": "x"}}, "structural_tag"),
            ({"sampling_params": {"top_p": 1.5}}, "sampling.top_p"),
            ({"tokenized": {"input_ids": []}}, "token_ids"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await it.generate(**fields)
            error = error_of(refused.value)
            assert isinstance(error, InvalidRequestError)
            assert name in error.message
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await it.theirs.Embed(vllm.EmbedRequest())
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
