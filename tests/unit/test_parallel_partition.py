"""How a model is cut into parts, what a rank reads of its weights, and what ranks tell each other."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.batch import Batch, SampleRequest, SamplingBatch, ScoreRequest, ScoringBatch, SequenceChunk
from pdserve.engine.batch import build_batch as build
from pdserve.engine.engine import EngineLostError
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.parallel.batch_codec import batch_from_arrays, batch_to_arrays
from pdserve.engine.parallel.messages import Channel, ChannelClosedError, Kind, ProtocolError, pack
from pdserve.engine.parallel.part_source import PartSource
from pdserve.engine.parallel.partition import VOCAB_UNIT, head_cuts, obstacle, partition
from pdserve.engine.parallel.remote_store import RemoteStore, serve_store
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.source import open_model
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.types import SamplingParams

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=130,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    output_bias=True,
)


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    inner=st.integers(64, 300),
    vocab=st.integers(1, 3000),
    size=st.integers(2, 8),
)
def test_parts_cover_everything_once_and_query_heads_go_with_the_kv_head_they_read(
    kv_heads: int, group: int, inner: int, vocab: int, size: int
) -> None:
    config = replace(
        CONFIG, num_heads=kv_heads * group, num_kv_heads=kv_heads, intermediate_size=inner, vocab_size=vocab
    )
    if obstacle(config, size) is not None:
        return
    parts = partition(config, size)
    for spans, end in (
        ([p.query_heads for p in parts], config.num_heads),
        ([p.inner for p in parts], inner),
        ([p.vocab for p in parts], vocab),
    ):
        assert [b for b, _ in spans] == [0, *(e for _, e in spans[:-1])]
        assert spans[-1][1] == end
        assert all(b < e for b, e in spans)
    assert all(p.vocab[0] % VOCAB_UNIT == 0 for p in parts)
    for part in parts:
        local = part.config(config)
        assert local.num_heads % local.num_kv_heads == 0
        for head in range(*part.query_heads):
            # What attention does with this rank's own numbers.
            own = (head - part.query_heads[0]) // (local.num_heads // local.num_kv_heads)
            assert part.kv_heads[0] + own == head // group
    assert sorted({h for p in parts for h in range(*p.kv_heads)}) == list(range(kv_heads))
    assert head_cuts(parts) == tuple(sorted({p.kv_heads[0] for p in parts} - {0}))
    assert [p.config(config).output_bias for p in parts] == [True] + [False] * (size - 1)


@pytest.mark.parametrize(
    ("change", "size", "says"),
    [
        ({"num_kv_heads": 4, "num_heads": 8}, 6, "4 KV heads cannot be copied evenly to 6 ranks"),
        ({"num_kv_heads": 2, "num_heads": 6}, 4, "6 query heads cannot be shared evenly by 4 ranks"),
        ({"vocab_size": 60}, 2, "too small for 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(change: dict[str, int], size: int, says: str) -> None:
    assert says in str(obstacle(replace(CONFIG, **change), size))  # type: ignore[arg-type]


def test_the_parts_of_all_ranks_are_the_weights_of_the_model(tmp_path: Path) -> None:
    shape = TinyShape(num_layers=1, num_heads=6, num_kv_heads=3, head_dim=16)
    source = open_model(str(make_tiny_kv(tmp_path / "m", shape=shape)))
    parts = [PartSource(source, part) for part in partition(source.config, 2)]
    for name in source.tensor_names():
        whole = source.tensor(name)
        pieces = [part.tensor(name) for part in parts]
        assert [piece.shape for piece in pieces] == [part.shape(name) for part in parts]
        assert all(piece.flags.c_contiguous and piece.base is None for piece in pieces if piece.shape != whole.shape)
        if name.endswith("norm.weight"):
            assert all(np.array_equal(piece, whole) for piece in pieces)
        else:
            axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert np.array_equal(np.concatenate(pieces, axis=axis), whole), name


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    pair = Channel(ours), Channel(theirs)
    try:
        yield pair
    finally:
        for channel in pair:
            channel.close()


def some_batch() -> Batch:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 5, repetition_penalty=1.2)
    edits = SequenceEdits(sampling, [5, 6, 7], [8])
    sample = SampleRequest(params=sampling, forbidden_token_ids=(3, 4), edits=edits.row(), num_logprobs=2)
    chunks = [
        SequenceChunk(token_ids=[1, 2, 3], start_position=4, block_table=[9, 2], samples=(sample, sample)),
        SequenceChunk(token_ids=[7], start_position=0, block_table=[1], score=ScoreRequest(target_ids=[5], num_top=3)),
    ]
    return build(chunks, 4)


def test_a_batch_arrives_as_it_was_sent() -> None:
    """A field that is added to a batch and not sent would make ranks compute different things."""
    batch = some_batch()
    with channels() as (ours, theirs):
        ours.send(Kind.FORWARD, batch_to_arrays(batch))
        kind, arrays = theirs.receive()
    assert kind is Kind.FORWARD
    received = batch_from_arrays(arrays)
    pairs: list[tuple[object, object, str]] = []
    for sent, got in (
        (batch, received),
        (batch.sampling, received.sampling),
        (batch.sampling.edits, received.sampling.edits),
        (batch.scoring, received.scoring),
    ):
        pairs += [(getattr(sent, f.name), getattr(got, f.name), f.name) for f in dataclasses.fields(sent)]
    for before, after, name in pairs:
        if isinstance(before, np.ndarray):
            assert isinstance(after, np.ndarray)
            assert (before.dtype, before.shape) == (after.dtype, after.shape), name
            assert np.array_equal(before, after), name
            assert after.flags.writeable, name
    # What is no array is sent otherwise, or made of what is.
    others = {name for before, _, name in pairs if not isinstance(before, np.ndarray)}
    assert others == {"sampling", "scoring", "edits", "allowed"}
    assert {type(batch), type(batch.sampling), type(batch.scoring)} == {Batch, SamplingBatch, ScoringBatch}


def test_what_is_no_message_is_refused() -> None:
    for data in (b"GET / HTTP/1.1\r\n", b"PDTP" + pack(Kind.DRAW)[4:8] + (1 << 40).to_bytes(8, "little")):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(data)
            with pytest.raises(ProtocolError, match="no message of a rank"):
                Channel(theirs).receive()
    with pytest.raises(ProtocolError, match="a batch of 1 arrays"):
        batch_from_arrays([np.zeros(1, np.int32)])


def test_a_channel_whose_other_end_has_gone_says_so() -> None:
    with channels() as (ours, theirs):
        theirs.close()
        with pytest.raises(ChannelClosedError):
            ours.receive()
        with pytest.raises(ChannelClosedError):
            ours.send(Kind.DRAW)


LAYOUT = KvLayout(dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)


def test_a_shard_of_another_process_reads_and_writes_like_one_of_this() -> None:
    here, there = NumpyBlockStore(LAYOUT, 9), NumpyBlockStore(LAYOUT, 9)
    here.data[:] = there.data[:] = np.random.default_rng(0).integers(0, 256, here.data.shape)
    with channels() as (ours, theirs):
        thread = threading.Thread(target=serve_store, args=(theirs, there))
        thread.start()
        remote: KvBlockStore = RemoteStore(ours, LAYOUT, "cuda:1")
        for heads in (None, (1, 2)):
            wanted = b"".join(here.read([3, 7], 1, 3, heads))
            assert b"".join(remote.read([3, 7], 1, 3, heads)) == wanted
            remote.write([0, 8], 1, 3, memoryview(wanted), heads)
            here.write([0, 8], 1, 3, memoryview(wanted), heads)
        remote.copy(7, 2)
        here.copy(7, 2)
        assert np.array_equal(here.data, there.data)
        assert remote.views([1], 0, 1) is None
        with pytest.raises(ValueError, match="do not fit"):
            remote.write([1], 0, 1, memoryview(bytes(5)))
        theirs._socket.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
        with pytest.raises(EngineLostError, match="has ended"):
            remote.read([1], 0, 1)
