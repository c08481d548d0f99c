"""What is left of a request for another router survives redis, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.telemetry.context import TraceContext
from router.resume_record import MAX_RESUME_NBYTES, ResolvedPrompt, ResumeRecord, Source, decode, encode

prompts = st.builds(
    ResolvedPrompt,
    st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**31 - 1),
)
records = st.builds(
    ResumeRecord,
    source=st.builds(Source, st.text(max_size=20), st.binary(max_size=200)),
    model=st.text(max_size=20),
    prompts=st.lists(prompts, min_size=1, max_size=4).map(tuple),
    created=st.integers(0, 2**40),
    deadline_s=st.floats(-1e6, 1e6),
    digest=st.binary(max_size=16),
    tenant=st.binary(max_size=32),
    trace=st.none()
    | st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), sampled=st.booleans()),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
EXAMPLE = ResumeRecord(
    source=Source("grpc", b"\x00body"),
    model="tiny",
    prompts=(ResolvedPrompt((1, 2), 3, 4),),
    created=5,
    deadline_s=6.5,
    digest=b"d",
    tenant=b"t",
    trace=TraceContext(7, 9, sampled=True),
)
OLDER = json.dumps(
    {
        "version": 1, "kind": "grpc", "body": "AGJvZHk=", "model": "tiny",
        "prompts": [{"ids": "AQAAAAIAAAA=", "seed": 3, "max_tokens": 4}],
        "created": 5, "deadline_s": 6.5, "digest": "64", "tenant": "74",
    }
).encode()  # fmt: skip
"""As the first routers wrote it."""


@given(records)
def test_a_record_is_read_as_it_was_written(record: ResumeRecord) -> None:
    assert decode(encode(record)) == record


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_record_is_told_by_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


@given(st.sampled_from(sorted(json.loads(encode(EXAMPLE)))), json_values)
def test_a_record_with_a_field_of_another_type_is_refused_or_says_the_same(name: str, value: object) -> None:
    changed = json.loads(encode(EXAMPLE)) | {name: value}
    try:
        record = decode(json.dumps(changed).encode())
    except ValueError:
        return
    assert decode(encode(record)) == record


def test_a_record_that_says_nothing_of_a_trace_is_read_as_before() -> None:
    assert decode(OLDER) == dataclasses.replace(EXAMPLE, trace=None)
    assert json.loads(encode(dataclasses.replace(EXAMPLE, trace=None))) == json.loads(OLDER)


def test_a_record_with_a_trace_has_all_that_older_routers_read() -> None:
    assert json.loads(encode(EXAMPLE)).items() >= json.loads(OLDER).items()


def test_a_trace_that_is_none_is_no_reason_not_to_go_on() -> None:
    changed = json.loads(encode(EXAMPLE)) | {"traceparent": "00-0-0-zz"}
    assert decode(json.dumps(changed).encode()) == dataclasses.replace(EXAMPLE, trace=None)


def test_a_record_of_another_version_is_refused() -> None:
    changed = json.loads(encode(EXAMPLE)) | {"version": 2}
    with pytest.raises(ValueError, match="version 2"):
        decode(json.dumps(changed).encode())


def test_a_request_that_is_too_much_for_redis_is_left_to_nobody() -> None:
    body = Source("grpc", bytes(MAX_RESUME_NBYTES + 1))
    long = (ResolvedPrompt((1,) * (MAX_RESUME_NBYTES // 4 + 1), 0, 1),)
    for change in ({"source": body}, {"prompts": long}):
        assert encode(ResumeRecord(**{f: getattr(EXAMPLE, f) for f in ResumeRecord.__slots__} | change)) == b""
