"""What lossy KV costs, and that converted KV costs nothing: continuations of SmolLM2 after a hand-off.

A prefill engine reads the beginning of a text, its KV goes through the chunks of a link to a decode engine with other
blocks, and that one reads on. The reference reads on in the engine that had computed the KV itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kv_transfer.chunk_io import decode_io, prefill_io
from kv_transfer.plan import ChunkPlan
from kv_transfer.wire_format import negotiate
from pdserve.engine import SequenceChunk, build_batch
from pdserve.engine.cpu.engine import CpuEngine
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import open_model
from pdserve.tokenizer.loader import load_tokenizer

DATA = Path(__file__).parent.parent / "data"
TEXTS = ("shakespeare", "gsm8k", "mt_bench", "humaneval")
PROMPT, CONTINUATION = 250, 120
"""Tokens: not whole blocks, so that the last one is partly filled."""
NUM_BLOCKS = 32

MAX_KL = {"int8": 0.005, "fp8": 0.008}
"""Mean over tokens of KL(exact || coded), in nats."""
MIN_TOP1 = {"int8": 0.96, "fp8": 0.95}
"""Share of tokens with the same most likely successor."""


def read(engine: CpuEngine, ids: Sequence[int], start: int, blocks: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits after each of `ids`, which begin at position `start`; their KV goes into `blocks`."""
    batch = build_batch(
        [SequenceChunk(token_ids=ids, start_position=start, block_table=blocks)], engine.layout.block_size
    )
    return engine.forward_logits(dataclasses.replace(batch, logit_rows=np.arange(len(ids), dtype=np.int32)))


@dataclasses.dataclass(frozen=True)
class Rig:
    """Two engines of the same model with other blocks, and texts."""

    prefill: CpuEngine
    decode: CpuEngine
    windows: list[list[int]]

    def exact(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The continuation in the engine that read the prompt."""
        return read(self.prefill, ids[PROMPT:], PROMPT, range(NUM_BLOCKS))

    def handed_over(self, ids: Sequence[int], codec: str) -> npt.NDArray[np.float32]:
        """The continuation in the other engine, from what was sent."""
        wire = negotiate(self.prefill.layout, self.decode.layout, codec)
        plan = ChunkPlan.make(PROMPT, self.prefill.layout, 1 << 20, tail_tokens=128).on(wire)
        source, target = prefill_io(self.prefill.store, wire), decode_io(self.decode.store, wire)
        blocks = range(3, 3 + self.decode.layout.num_blocks(PROMPT + CONTINUATION))
        for seq in range(plan.num_chunks):
            chunk = plan.chunk(seq)
            target.write(blocks, chunk, memoryview(b"".join(source.read(range(NUM_BLOCKS), chunk))))
        return read(self.decode, ids[PROMPT:], PROMPT, blocks)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    source = open_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    windows = []
    for name in TEXTS:
        ids = tokenizer.encode((DATA / f"{name}.txt").read_text("utf-8"))
        windows.append(ids[: PROMPT + CONTINUATION])
    yield Rig(
        prefill=load_cpu_engine(source, num_blocks=NUM_BLOCKS, num_threads=1),
        decode=load_cpu_engine(source, num_blocks=NUM_BLOCKS, block_size=32, num_threads=1),
        windows=windows,
    )


@pytest.mark.timeout(600)  # 15 s of one core, and the compilation of the kernels
def test_converted_kv_is_exact_and_coded_kv_is_close(rig: Rig) -> None:
    kl: dict[str, list[float]] = {"int8": [], "fp8": []}
    same: dict[str, list[bool]] = {"int8": [], "fp8": []}
    for ids in rig.windows:
        read(rig.prefill, ids[:PROMPT], 0, range(NUM_BLOCKS))
        reference = rig.exact(ids)
        assert (rig.handed_over(ids, "none") == reference).all(), "blocks of 32 tokens from blocks of 16, bit by bit"
        for codec in kl:
            coded = rig.handed_over(ids, codec)
            assert (coded != reference).any(), "the codec is really in the way"
            kl[codec] += divergence(reference, coded).tolist()
            same[codec] += (reference.argmax(-1) == coded.argmax(-1)).tolist()
    summary = {codec: (len(kl[codec]), float(np.mean(kl[codec])), float(np.mean(same[codec]))) for codec in kl}
    print(summary)  # Shown with -rP.
    for codec, (count, mean_kl, top1) in summary.items():
        assert count >= 480
        assert mean_kl <= MAX_KL[codec], summary
        assert top1 >= MIN_TOP1[codec], summary


def divergence(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """KL(reference || other) of each row of logits."""
    p, q = (x.astype(np.float64) - x.max(-1, keepdims=True) for x in (reference, other))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    result: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return result
