"""Requests that must be refused, and those just inside the limits: a typed error each, and a cluster that goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.client import Client
from pdserve.errors import InvalidRequestError, NotFoundError, OverloadedError, PdServeError, PromptTooLongError
from pdserve.rpc.errors import error_of
from pdserve.rpc.options import MAX_MESSAGE_BYTES
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as rpc
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster, wait_until
from pdserve.testing.reference import check_greedy
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.types import Role

pytestmark = pytest.mark.timeout(180)

CANARY = list(range(40, 80))
NUM_CANARY_TOKENS = 6


@pytest.fixture(scope="module")
def canary(reference_model: Any) -> Callable[[Client], None]:
    """Sends a request whose tokens are known."""

    def send(client: Client) -> None:
        result = client.generate(token_ids=CANARY, max_tokens=NUM_CANARY_TOKENS, temperature=0.0, ignore_eos=True)
        (check,) = check_greedy(reference_model, [CANARY], [result.token_ids])
        assert check.wrong_step is None
        assert len(result.token_ids) == NUM_CANARY_TOKENS

    return send


@pytest.fixture(scope="module")
def vocab_size(one_pair: ProcessCluster) -> int:
    return one_pair.client.models()[0].vocab_size


@pytest.fixture
def survives(one_pair: ProcessCluster, canary: Callable[[Client], None]) -> Iterator[ProcessCluster]:
    """ALIVE after the test: nobody died, and a request is served exactly."""
    yield one_pair
    one_pair.assert_alive()
    canary(one_pair.client)


def refusal(cluster: ProcessCluster, request: pb.GenerateRequest | bytes) -> PdServeError:
    """The error that a raw message gets, whatever our client would have made of it."""
    with grpc.insecure_channel(cluster.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/pdserve.rpc.v1.Inference/Generate")
        data = request if isinstance(request, bytes) else request.SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            list(call(data, timeout=CALL_TIMEOUT_S))
    return error_of(caught.value)


def message(**fields: Any) -> pb.GenerateRequest:
    """A valid request with `fields` instead."""
    sampling, stop = fields.pop("sampling", {}), fields.pop("stop", {})
    if not {"text", "token_ids", "chat", "no_input"} & set(fields):
        fields["text"] = "hello"
    fields.pop("no_input", None)
    request = pb.GenerateRequest(**fields)
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    for name, value in stop.items():
        if isinstance(value, list):
            getattr(request.stop, name).extend(value)
        else:
            setattr(request.stop, name, value)
    return request


NOT_FINITE = (math.nan, math.inf, -math.inf)
BAD_SAMPLING = (
    *(("temperature", v) for v in (*NOT_FINITE, -1.0, 3e38)),
    *(("top_p", v) for v in (*NOT_FINITE, -1.0, 0.0, 1.5, 3e38)),
    *(("min_p", v) for v in (*NOT_FINITE, -1.0, 1.5, 3e38)),
    *(("top_k", v) for v in (-1, -(2**31), 2**31 - 1)),
)
BAD_STOP = (
    *(("max_tokens", v) for v in (0, -1, -(2**31), 2**31 - 1)),
    *(("min_tokens", v) for v in (-1, 2**31 - 1)),
    *(("stop_token_ids", v) for v in ([-1], [2**31 - 1], [5] * 1000)),
    *(("stop", v) for v in ([""], ["x"] * 17, ["x" * 5000])),
)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [*(("sampling", *case) for case in BAD_SAMPLING), *(("stop", *case) for case in BAD_STOP)],
    ids=lambda v: str(v)[:20],
)
def test_a_parameter_out_of_range_is_named(survives: ProcessCluster, section: str, name: str, value: Any) -> None:
    """O-VAL-4."""
    error = refusal(survives, message(**{section: {name: value}}))
    assert isinstance(error, InvalidRequestError)
    assert f"{section}.{name}" in error.message


def test_min_tokens_above_max_tokens_is_refused(survives: ProcessCluster) -> None:
    error = refusal(survives, message(stop={"max_tokens": 3, "min_tokens": 4}))
    assert isinstance(error, InvalidRequestError)
    assert "min_tokens" in error.message


@pytest.mark.parametrize("bad", ["vocabulary", -1, 4294967295, 2**63 - 1, -(2**63)])
def test_an_id_outside_the_vocabulary_is_named(survives: ProcessCluster, vocab_size: int, bad: int | str) -> None:
    """O-VAL-3."""
    bad_id = vocab_size if isinstance(bad, str) else bad
    error = refusal(survives, message(token_ids=pb.TokenIds(ids=[5, bad_id, 6])))
    assert isinstance(error, InvalidRequestError)
    assert "token_ids.ids[1]" in error.message
    assert str(bad_id) in error.message


@pytest.mark.parametrize("bad", [2**63, 1.5, "7", None])
def test_an_id_that_is_no_integer_does_not_leave_the_client(survives: ProcessCluster, bad: Any) -> None:
    """O-VAL-3."""
    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\]"):
        survives.client.generate(token_ids=[5, bad])


def test_the_last_id_of_the_vocabulary_is_served(survives: ProcessCluster, vocab_size: int) -> None:
    """O-VAL-3: control."""
    result = survives.client.generate(token_ids=[vocab_size - 1], max_tokens=2, ignore_eos=True)
    assert result.usage.completion_tokens == 2


def test_an_empty_prompt_is_refused_unless_bos_is_added(
    survives: ProcessCluster, script_b: ProcessCluster, reference_model: Any
) -> None:
    """O-VAL-1."""
    for empty in (message(text=""), message(token_ids=pb.TokenIds())):
        error = refusal(script_b, empty)
        assert isinstance(error, InvalidRequestError)
        assert "the prompt is empty" in error.message
    for nothing in (message(no_input=True), message(chat=pb.ChatPrompt()), message(token_ids=pb.TokenIds())):
        assert isinstance(refusal(survives, nothing), InvalidRequestError)
    script_b.assert_alive()
    result = survives.client.generate("", max_tokens=4, temperature=0.0, ignore_eos=True)
    assert result.usage.prompt_tokens == 1
    (bos,) = survives.client.tokenize("")
    (check,) = check_greedy(reference_model, [[bos]], [result.token_ids])
    assert check.wrong_step is None


def test_an_unknown_model_is_named(survives: ProcessCluster) -> None:
    error = refusal(survives, message(model="gpt-7"))
    assert isinstance(error, NotFoundError)
    assert "gpt-7" in error.message


@pytest.mark.parametrize("request_id", ["two words", "new\nline", "ünïcode", "x" * 129, "x" * 10_000])
def test_a_bad_request_id_is_refused(survives: ProcessCluster, request_id: str) -> None:
    """O-RTR-4."""
    error = refusal(survives, message(request_id=request_id))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "request_id"


@pytest.mark.parametrize("role", ["", "robot", "x" * 1000])
def test_an_unknown_role_is_refused(survives: ProcessCluster, role: str) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content="hello")])
    error = refusal(survives, message(chat=chat))
    assert isinstance(error, InvalidRequestError)
    assert "chat.messages[0].role" in error.message


@pytest.mark.parametrize(
    "data", [b"\x1a\x04\xff\xfe\xc0\x80", b"\xff" * 50, b"\x1a\xff\xff\xff\xff\x0f"], ids=["utf-8", "junk", "length"]
)
def test_bytes_that_are_no_message_are_refused(survives: ProcessCluster, data: bytes) -> None:
    """Invalid UTF-8 in the prompt, and what is not protobuf at all."""
    assert isinstance(refusal(survives, data), PdServeError)


def test_text_that_is_not_unicode_does_not_leave_the_client(survives: ProcessCluster) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        survives.client.generate("lone surrogate \ud800")


def test_an_oversized_message_names_the_limit_and_the_channel_goes_on(survives: ProcessCluster) -> None:
    """O-KVT-5."""
    limit = survives.config.router.grpc_max_message_bytes
    request = message(text="x" * (MAX_MESSAGE_BYTES + 1000))
    with grpc.insecure_channel(survives.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = rpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=CALL_TIMEOUT_S))
        error = error_of(caught.value)
        assert isinstance(error, OverloadedError)
        assert str(limit) in error.message
        assert len(list(stub.Generate(message(stop={"max_tokens": 1}), timeout=CALL_TIMEOUT_S))) == 1
    # Our client does not even send it, and says the same.
    with pytest.raises(OverloadedError, match=str(MAX_MESSAGE_BYTES)):
        survives.client.generate(request.text)


def test_a_prompt_of_too_many_bytes_names_the_setting_limit(survives: ProcessCluster) -> None:
    limit = survives.config.router.max_prompt_bytes
    error = refusal(survives, message(text="x" * (limit + 1)))
    assert isinstance(error, InvalidRequestError)
    assert f"at most {limit} bytes" in error.message


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(2047, 1, 1), (2047, None, 1), (2048, None, None), (2049, None, None), (2024, 24, 24), (2024, 25, None)],
)
def test_the_context_limit_is_exact(
    survives: ProcessCluster, reference_model: Any, num_prompt: int, max_tokens: int | None, expected: int | None
) -> None:
    """O-VAL-2."""
    assert survives.client.models()[0].max_model_len == 2048
    prompt = np.random.default_rng(7).integers(3, 300, num_prompt).tolist()
    options: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    if expected is None:
        with pytest.raises(PromptTooLongError, match="2048"):
            survives.client.generate(token_ids=prompt, temperature=0.0, ignore_eos=True, **options)
        return
    result = survives.client.generate(token_ids=prompt, temperature=0.0, ignore_eos=True, **options)
    assert result.usage.completion_tokens == expected
    assert result.finish_reason == "length"
    (check,) = check_greedy(reference_model, [prompt], [result.token_ids])
    assert check.wrong_step is None


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-12])
def test_a_tiny_temperature_is_greedy(survives: ProcessCluster, temperature: float) -> None:
    """O-VAL-4: at 1e-2 a token 0.01 behind the best is still likely, so a near tie may be drawn either way there."""
    rng = np.random.default_rng(8)
    exact = 0
    for _ in range(6):
        prompt = rng.integers(3, 300, 20).tolist()
        ids = {
            survives.client.generate(token_ids=prompt, max_tokens=5, temperature=t, seed=1, ignore_eos=True).token_ids
            for t in (0.0, temperature)
        }
        assert {len(i) for i in ids} == {5}
        exact += len(ids) == 1
    assert exact >= (4 if temperature == 1e-2 else 6)


def test_the_prefill_leg_leaves_max_tokens_alone(one_pair: ProcessCluster) -> None:
    """O-VAL-5."""
    (prefill,), (decode,) = one_pair.stats_of(Role.PREFILL), one_pair.stats_of(Role.DECODE)
    client = one_pair.client
    prompt = list(range(3, 43))
    given_none = client.generate(token_ids=prompt, temperature=0.0, ignore_eos=True)
    assert given_none.usage.completion_tokens == one_pair.config.router.default_max_tokens
    both = client.generate(token_ids=prompt, max_tokens=20, min_tokens=10)
    assert 10 <= both.usage.completion_tokens <= 20
    chat = client.generate(messages=[{"role": "user", "content": "hello"}], max_tokens=5)
    assert chat.usage.completion_tokens <= 5
    results = (given_none, both, chat)
    (prefill_after,), (decode_after,) = one_pair.stats_of(Role.PREFILL), one_pair.stats_of(Role.DECODE)
    assert prefill_after.generated_tokens_total - prefill.generated_tokens_total == len(results)
    drawn = sum(r.usage.completion_tokens for r in results) - len(results)
    assert decode_after.generated_tokens_total - decode.generated_tokens_total >= drawn
    assert prefill_after.prefill_tokens_total - prefill.prefill_tokens_total == sum(
        r.usage.prompt_tokens - r.usage.cached_tokens for r in results
    )


WIDE = TinyShape(hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=64)
"""16 KiB of KV per token in float32."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "wide", shape=WIDE)


@pytest.fixture(scope="module")
def pools(wide_model: Path) -> Iterator[ProcessCluster]:
    """Pools of 8 blocks, chunks larger than gRPC's default limit."""
    with ProcessCluster(wide_model, kv__num_blocks=8, transfer__chunk_bytes=8 << 20, store__lease_ttl_s=3.0) as cluster:
        yield cluster


def test_kv_pools_set_limits_and_large_kv_is_moved(pools: ProcessCluster, wide_model: Path) -> None:
    """O-VAL-6 with a small pool on one side after the other, then O-KVT-5 on the large ones."""
    torch.set_num_threads(1)
    reference: Any = AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32)
    reference.eval()
    rng = np.random.default_rng(9)

    def generate_exactly(num_prompt: int, num_tokens: int) -> int:
        prompt = rng.integers(3, 300, num_prompt).tolist()
        result = pools.client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        (check,) = check_greedy(reference, [prompt], [result.token_ids])
        assert check.wrong_step is None
        return result.placement.kv_bytes

    def refused(side: str) -> None:
        with pytest.raises(PromptTooLongError, match=f"KV pool of the largest {side} worker"):
            pools.client.generate(token_ids=[5] * 200, max_tokens=8, timeout_s=10.0)
        answer = httpx2.post(
            f"http://{pools.local.http_address}/v1/completions",
            json={"prompt": [5] * 200, "max_tokens": 8},
            timeout=10.0,
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt")
        assert side in error["message"]
        for _ in range(5):
            generate_exactly(20, 4)

    refused("decode")
    pools.add_worker(Role.DECODE, "decode-large", kv__num_blocks=80)
    refused("prefill")
    pools.add_worker(Role.PREFILL, "prefill-large", kv__num_blocks=80)
    pools.assert_quiet()
    for num_prompt in (250, 256, 260, 512, 1024):
        assert generate_exactly(num_prompt, 4) >= num_prompt * 16 * 1024
    pools.assert_quiet()
    pools.kill_worker("decode-large")
    # Until its lease ends it may come back, and limits are those of a deployment that has it.
    wait_until(lambda: len(pools.client.status().workers) == 3, "its registration has expired")
    refused("decode")
