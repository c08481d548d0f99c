"""The CPU engine: tokens of transformers, and the same bits for a request however it is computed.

Logits and KV bytes are compared with `==`: with int8 activations the products are exact integers, and floating point
follows one order per token whatever the batch, the chunking, the threads or the instruction set.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.core_ledger import STEP, CoreLedger, create_ledger
from pdserve.engine import Engine, SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.engine.batch import ScoreRequest
from pdserve.engine.cpu.engine import CpuEngine
from pdserve.engine.cpu.isa import ISA_ENV, supported_isas
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.engine.cpu.weights import WeightFormat
from pdserve.engine.output import Logprobs
from pdserve.errors import ConfigError
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.cpu_digest import digest_of
from pdserve.testing.prompts import REAL_PROMPTS
from pdserve.testing.reference import generate, transformers_model
from pdserve.testing.tiny_families import ROPE_SCALINGS, make_tiny_family
from pdserve.testing.tiny_gguf import write_gguf
from pdserve.tokenizer.loader import load_tokenizer
from pdserve.types import SamplingParams

pytestmark = pytest.mark.timeout(400)  # Whichever test comes first compiles the kernels if nobody has.

NUM_NEW_TOKENS = 6
LENGTHS = (1, 3, 16, 17, 33, 64, 127, 128, 129, 150)
MIN_GAP = 0.02
"""Least lead of the best logit for a step to count. K and V are float16 here and float32 in the reference, which on
these models moves logits by some thousandths."""

THETA = {"rope_theta": 10000.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim 16, 8 heads on 1": ("llama", {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "head_dim 16, 3 heads on 3, odd sizes": (
        "llama",
        {
            "head_dim": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 72,
            "intermediate_size": 200,
        },
    ),
    "head_dim 32, tied": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "head_dim 64, 9 heads on 3": (
        "llama",
        {"hidden_size": 288, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "head_dim 80, 3 heads on 1": (
        "llama",
        {
            "hidden_size": 240,
            "head_dim": 80,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 72,
        },
    ),
    "head_dim 96": ("phi3", {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "head_dim 128, vocabulary of 701": ("mistral", {"head_dim": 128, "num_attention_heads": 2, "vocab_size": 701}),
    "output bias": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied, 7 heads on 1": (
        "qwen2",
        {"tie_word_embeddings": True, "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, head_dim 128": ("qwen3", {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 1}),
    "window of 20": ("mistral", {"head_dim": 64, "sliding_window": 20}),
    "window of 40 in the last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "llama3 scaling": ("llama", {"rope_parameters": THETA | ROPE_SCALINGS["llama3"]}),
    "linear scaling": ("llama", {"rope_parameters": THETA | ROPE_SCALINGS["linear"]}),
    "yarn": ("qwen3", {"rope_parameters": THETA | ROPE_SCALINGS["yarn"] | {"attention_factor": 1.4}}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def source_of(models: Path, case: str) -> ModelSource:
    directory = models / case
    if not directory.exists():
        family, config = MODELS[case]
        make_tiny_family(directory, family, **config)
    return open_model(str(directory))


def prompts_for(source: ModelSource, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in lengths]


def first_wrong(model: Any, prompt: list[int], output: Sequence[int]) -> tuple[int | None, int]:
    """(first token that is not the best although that leads by MIN_GAP, steps judged)."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    with torch.inference_mode():
        best = model(ids, logits_to_keep=len(output)).logits[0].topk(2)
    for i, token in enumerate(output):
        if int(best.indices[i, 0]) != token:
            clear = bool(best.values[i, 0] - best.values[i, 1] >= MIN_GAP)
            return (i, i + 1) if clear else (None, i)  # After a near tie the reference goes elsewhere.
    return None, len(output)


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS)
def test_float32_weights_give_the_tokens_of_transformers(models: Path, case: str) -> None:
    """Chunked prefill among decode rows, on two threads."""
    source = source_of(models, case)
    prompts = prompts_for(source)
    engine = load_cpu_engine(source, weights="f32", num_blocks=150, num_threads=2)
    outputs = generate(engine, prompts, NUM_NEW_TOKENS, budget_tokens=100)
    model = transformers_model(source)
    checks = [first_wrong(model, p, o) for p, o in zip(prompts, outputs, strict=True)]
    assert [wrong for wrong, _ in checks] == [None] * len(prompts)
    assert sum(judged for _, judged in checks) >= 0.8 * NUM_NEW_TOKENS * len(prompts)


def test_float16_weights_give_the_tokens_of_transformers(models: Path) -> None:
    source = source_of(models, "head_dim 64, 9 heads on 3")
    prompts = prompts_for(source)
    outputs = generate(load_cpu_engine(source, weights="f16", num_blocks=150, num_threads=1), prompts, NUM_NEW_TOKENS)
    model = transformers_model(source)
    # These weights are not float16: what they are rounded by decides more ties than usual.
    assert sum(first_wrong(model, p, o)[0] is None for p, o in zip(prompts, outputs, strict=True)) >= len(prompts) - 2


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_products_are_close_to_those_of_decoded_weights(models: Path, weight_type: str) -> None:
    """On a random model nothing but the rounding of activations to 8 bits is in the difference."""
    source_of(models, "head_dim 64, 9 heads on 3")
    file = write_gguf(models / "head_dim 64, 9 heads on 3", models / f"{weight_type}.gguf", weight_type=weight_type)
    source = open_model(str(file))
    prompt = prompts_for(source, [64])[0]
    quantised, exact = (
        logits_and_kv(load_cpu_engine(source, weights=weights, num_blocks=8, num_threads=1), [Piece(prompt, [64])])[0][
            0
        ]
        for weights in ("auto", "f32")
    )
    assert np.corrcoef(quantised, exact)[0, 1] > 0.995


# --- bit for bit ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A sequence and the chunks it is computed in, one for each step from `start` on."""

    token_ids: list[int]
    chunks: list[int]
    start: int = 0


def logits_and_kv(engine: Engine, pieces: Sequence[Piece], block_seed: int = 0) -> list[tuple[Any, bytes]]:
    """Logits after the last token, and the bytes of the KV blocks, of each sequence; blocks are dealt at random."""
    layout = engine.layout
    free = np.random.default_rng(block_seed).permutation(engine.num_blocks).tolist()
    tables = [[free.pop() for _ in range(layout.num_blocks(len(p.token_ids)))] for p in pieces]
    done = [0] * len(pieces)
    logits: dict[int, Any] = {}
    for step in range(max(p.start + len(p.chunks) for p in pieces)):
        members, chunks = [], []
        for i, piece in enumerate(pieces):
            if not piece.start <= step < piece.start + len(piece.chunks):
                continue
            count = piece.chunks[step - piece.start]
            chunks.append(
                SequenceChunk(
                    token_ids=piece.token_ids[done[i] : done[i] + count],
                    start_position=done[i],
                    block_table=tables[i],
                    samples=(SampleRequest(params=SamplingParams()),),
                )
            )
            done[i] += count
            members.append(i)
        rows = engine.forward_logits(build_batch(chunks, layout.block_size))
        logits |= dict(zip(members, rows, strict=True))
    assert done == [len(p.token_ids) for p in pieces]
    return [(logits[i], kv_bytes(engine, tables[i], len(p.token_ids))) for i, p in enumerate(pieces)]


def kv_bytes(engine: Engine, table: Sequence[int], length: int) -> bytes:
    """K and V of the tokens in the blocks, without the slots behind the last one."""
    layout = engine.layout
    parts = []
    for i, block in enumerate(table):
        raw = b"".join(engine.store.read([block], 0, layout.num_layers))
        filled = min(layout.block_size, length - i * layout.block_size)
        words = np.frombuffer(raw, np.uint16).reshape(layout.num_layers, 2, layout.num_kv_heads, -1)
        keys = words[:, 0].reshape(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
        values = words[:, 1].reshape(layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim)
        parts += [keys[..., :filled].tobytes(), values[:, :, :filled].tobytes()]
    return b"".join(parts)


def same(results: Sequence[tuple[Any, bytes]], expected: Sequence[tuple[Any, bytes]]) -> None:
    for (logits, kv), (wanted_logits, wanted_kv) in zip(results, expected, strict=True):
        assert logits.tobytes() == wanted_logits.tobytes()
        assert kv == wanted_kv


BITWISE: dict[str, tuple[str, WeightFormat]] = {
    "q8_0, padded rows": ("head_dim 16, 3 heads on 3, odd sizes", "auto"),
    "q4_1, padded heads": ("head_dim 80, 3 heads on 1", "q4_1"),
    "f32": ("head_dim 64, 9 heads on 3", "f32"),
    "f16, norms and biases": ("qwen3, head_dim 128", "f16"),
    "q8_0, 7 heads on 1": ("qwen2, tied, 7 heads on 1", "q8_0"),
    "q8_0, window": ("window of 20", "auto"),
}


@pytest.mark.parametrize("case", BITWISE)
def test_chunks_batches_threads_and_blocks_do_not_change_a_bit(models: Path, case: str) -> None:
    """One shot, any split, token by token; alone, and among others in any order; on a pool that others have used."""
    name, weights = BITWISE[case]
    source = source_of(models, name)
    prompts = prompts_for(source, (150, 7, 33, 130), seed=3)
    engines = [load_cpu_engine(source, weights=weights, num_blocks=40, num_threads=n) for n in (1, 2, 3)]
    alone = [logits_and_kv(engines[0], [Piece(p, [len(p)])], block_seed=i)[0] for i, p in enumerate(prompts)]
    assert len({kv for _, kv in alone}) == len(prompts)

    first = prompts[0]
    for seed, chunks in enumerate(([1, 149], [33, 7, 110], [16] * 9 + [6], [128, 22], [2, 3, 60, 84, 1])):
        same(logits_and_kv(engines[seed % 3], [Piece(first, chunks)], block_seed=seed), alone[:1])
    same(logits_and_kv(engines[0], [Piece(first, [1] * 150)]), alone[:1])

    mixed = [
        Piece(first, [50, 1, 99]),
        Piece(prompts[1], [1] * 7),
        Piece(prompts[2], [33], 2),
        Piece(prompts[3], [129, 1], 1),
    ]
    for seed, engine in enumerate(engines):
        same(logits_and_kv(engine, mixed, block_seed=10 + seed), alone)
        same(logits_and_kv(engine, mixed[::-1], block_seed=20 + seed), alone[::-1])
    for engine in engines[1:]:
        together = [Piece(p, [len(p)]) for p in prompts]
        same(logits_and_kv(engine, together), alone)


def test_cores_that_come_and_go_between_steps_do_not_change_a_bit(models: Path, tmp_path: Path) -> None:
    """A neighbour computes in every other step, so that this worker has one thread, then three, and so on."""
    name, weights = BITWISE["q4_1, padded heads"]
    source = source_of(models, name)
    prompts = prompts_for(source, (90, 33), seed=5)
    pieces = [Piece(prompts[0], [20] * 4 + [1] * 10), Piece(prompts[1], [1] * 5 + [28], 2)]
    alone = load_cpu_engine(source, weights=weights, num_blocks=40, num_threads=1)
    expected = logits_and_kv(alone, pieces)
    create_ledger(tmp_path / "cores", 2)
    neighbour = CoreLedger(tmp_path / "cores", 1, share=2, num_cores=3)
    taken: list[int] = []

    class Watched(CoreLedger):
        def step_begins(self) -> int:
            if len(taken) % 2 == 0:
                neighbour.step_begins()
            taken.append(super().step_begins())
            # Over for long.
            neighbour._own[STEP] = 0
            return taken[-1]

    cores = Watched(tmp_path / "cores", 0, share=1, num_cores=3)
    engine = load_cpu_engine(source, weights=weights, num_blocks=40, num_threads=1, cores=cores)
    same(logits_and_kv(engine, pieces), expected)
    assert set(taken[::2]) == {1} and set(taken[1::2]) == {3}


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_the_block_size_does_not_change_a_bit_of_the_logits(models: Path, block_size: int) -> None:
    source = source_of(models, "head_dim 64, 9 heads on 3")
    prompts = prompts_for(source, (150, 31), seed=4)
    results = []
    for size in (16, block_size):
        engine = load_cpu_engine(source, num_blocks=400 // size + 4, block_size=size, num_threads=1)
        results.append(logits_and_kv(engine, [Piece(p, [10, len(p) - 10]) for p in prompts], block_seed=size))
    assert [x.tobytes() for x, _ in results[0]] == [x.tobytes() for x, _ in results[1]]


def test_smollm2_computes_the_same_bits_in_any_batch() -> None:
    source = open_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    prompts = [tokenizer.encode(t) for t in (REAL_PROMPTS[7], REAL_PROMPTS[14], REAL_PROMPTS[0])]
    engines = [load_cpu_engine(source, num_blocks=16, num_threads=n) for n in (1, 2)]
    alone = [logits_and_kv(engines[0], [Piece(p, [len(p)])], block_seed=i)[0] for i, p in enumerate(prompts)]
    mixed = [
        Piece(prompts[0], [5, 1, len(prompts[0]) - 6], 1),
        Piece(prompts[1], [1] * len(prompts[1])),
        Piece(prompts[2], [len(prompts[2]) - 1, 1], 3),
    ]
    for engine in engines:
        same(logits_and_kv(engine, mixed, block_seed=5), alone)


@pytest.mark.skipif(len(supported_isas()) < 2, reason="this CPU runs one of the instruction sets only")
def test_instruction_sets_compute_the_same_bits(models: Path) -> None:
    """A worker on an older CPU can take a request over. The other process compiles kernels of its own."""
    names = ["head_dim 16, 3 heads on 3, odd sizes", "qwen3, head_dim 128"]
    for name in (*names, "head_dim 64, 9 heads on 3"):
        source_of(models, name)
    stored = write_gguf(models / "head_dim 64, 9 heads on 3", models / "digest.gguf", weight_type="Q4_0")
    paths = [*(str(models / name) for name in names), str(stored)]
    command = [sys.executable, "-m", "pdserve.testing.cpu_digest", *paths]
    environment = os.environ | {ISA_ENV: supported_isas()[-1], "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=380).stdout
    theirs = json.loads(output)
    assert theirs["isa"] == supported_isas()[-1]
    assert theirs["digests"] == [digest_of(path) for path in paths]


# --- sampling and log-probabilities ---------------------------------------------------------------------------------


def test_a_sampled_request_draws_the_same_tokens_in_any_batch(models: Path) -> None:
    source = source_of(models, "head_dim 32, tied")
    prompts = prompts_for(source, (40, 3, 17))
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(temperature=1.2, top_k=30, min_p=0.01, seed=3, repetition_penalty=1.2),
    ]
    alone = [
        generate(load_cpu_engine(source, num_blocks=20, num_threads=1), [p], 16, sampling=[q])[0]
        for p, q in zip(prompts, params, strict=True)
    ]
    engine = load_cpu_engine(source, num_blocks=40, num_threads=2)
    assert generate(engine, prompts, 16, sampling=params, budget_tokens=16, block_seed=4) == alone
    assert len(set(alone[0])) > 8


def score(engine: Engine, prompt: list[int], chunks: Sequence[int], num_top: int = 5) -> Logprobs:
    """Log-probabilities of the prompt from its second token on."""
    table = range(engine.layout.num_blocks(len(prompt)))
    parts, begin = [], 0
    for count in chunks:
        end = begin + count
        request = ScoreRequest(target_ids=prompt[begin + 1 : end + 1], num_top=num_top) if end > begin else None
        chunk = SequenceChunk(token_ids=prompt[begin:end], start_position=begin, block_table=table, score=request)
        found = engine.forward(build_batch([chunk], engine.layout.block_size)).prompt_logprobs
        if found is not None:
            parts.append(found)
        begin = end
    return Logprobs.concatenate(parts)


def test_prompt_logprobs_are_those_of_the_torch_engine_and_of_any_chunking(models: Path) -> None:
    """More rows than are computed at once; two threads."""
    source = source_of(models, "head_dim 64, 9 heads on 3")
    prompt = prompts_for(source, [150])[0]
    engine = load_cpu_engine(source, weights="f32", num_blocks=10, num_threads=2)
    whole = score(engine, prompt, [150])
    assert whole.token_ids.tolist() == prompt[1:]
    for chunks in ([100, 50], [1, 64, 65, 20], [149, 1]):
        other = score(engine, prompt, chunks)
        assert other.logprobs.tobytes() == whole.logprobs.tobytes()
        assert other.top_ids.tobytes() == whole.top_ids.tobytes()
        assert other.top_logprobs.tobytes() == whole.top_logprobs.tobytes()
    reference = score(load_engine(source, num_blocks=10), prompt, [150])
    np.testing.assert_allclose(whole.logprobs, reference.logprobs, atol=0.02)
    np.testing.assert_allclose(whole.top_logprobs, reference.top_logprobs, atol=0.02)


def test_logprobs_of_drawn_tokens_are_of_the_raw_logits(models: Path) -> None:
    source = source_of(models, "head_dim 32, tied")
    prompt = prompts_for(source, [20])[0]
    engine = load_cpu_engine(source, num_blocks=4, num_threads=1)
    request = SampleRequest(params=SamplingParams(temperature=0.7, top_k=3, seed=5), num_logprobs=4,
                            forbidden_token_ids=(1, 2))  # fmt: skip
    chunk = SequenceChunk(token_ids=prompt, start_position=0, block_table=[2, 0], samples=(request,))
    batch = build_batch([chunk], 16)
    raw = engine.forward_logits(batch)[0].astype(np.float64)
    output = engine.forward(batch)
    logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs.logprobs[0], logprobs[output.token_ids[0]], atol=1e-5)
    assert output.logprobs.top_ids[0].tolist() == np.argsort(-logprobs, kind="stable")[:4].tolist()


def test_several_tokens_drawn_after_one_row_are_those_of_rows_of_their_own(models: Path) -> None:
    source = source_of(models, "head_dim 32, tied")
    prompts = prompts_for(source, [20, 37])
    engine = load_cpu_engine(source, num_blocks=6, num_threads=2)
    requests = tuple(
        SampleRequest(params=SamplingParams(temperature=t, seed=seed), num_logprobs=n, forbidden_token_ids=ids)
        for t, seed, n, ids in ((1.0, 1, None, ()), (1.0, 2, 3, (4, 5)), (0.0, 3, 1, ()), (0.8, 4, None, ()))
    )
    tables = ([0, 1], [2, 3, 4])
    together = engine.forward(
        build_batch(
            [
                SequenceChunk(token_ids=p, start_position=0, block_table=t, samples=requests)
                for p, t in zip(prompts, tables, strict=True)
            ],
            16,
        )
    )
    alone = [
        engine.forward(
            build_batch([SequenceChunk(token_ids=p, start_position=0, block_table=t, samples=(request,))], 16)
        )
        for p, t in zip(prompts, tables, strict=True)
        for request in requests
    ]
    assert together.token_ids.tolist() == [output.token_ids.tolist()[0] for output in alone]
    assert together.logprobs is not None
    expected = [output.logprobs.logprobs[0] for output in alone if output.logprobs is not None]
    np.testing.assert_array_equal(together.logprobs.logprobs, expected)


def test_forbidden_tokens_are_never_drawn(models: Path) -> None:
    """The best ones are forbidden, for a greedy row and for one that looks at every token."""
    source = source_of(models, "head_dim 32, tied")
    prompt = prompts_for(source, [20])[0]
    engine = load_cpu_engine(source, num_blocks=4, num_threads=1)
    plain = SequenceChunk(
        token_ids=prompt, start_position=0, block_table=[0, 1], samples=(SampleRequest(params=SamplingParams()),)
    )
    order = np.argsort(-engine.forward_logits(build_batch([plain], 16))[0]).tolist()
    for params, allowed in (
        (SamplingParams(temperature=0.0), order[3]),
        (SamplingParams(temperature=1e-3, top_p=0.9999999, min_p=1e-30), order[3]),
    ):
        request = SampleRequest(params=params, forbidden_token_ids=tuple(order[:3]))
        chunk = SequenceChunk(token_ids=prompt, start_position=0, block_table=[0, 1], samples=(request,))
        assert engine.forward(build_batch([chunk], 16)).token_ids.tolist() == [allowed]


# --- loading --------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_served_are_refused_by_name(models: Path) -> None:
    source = source_of(models, "head_dim 32, tied")
    for block_size in (8, 24, 48, 256):
        with pytest.raises(ConfigError, match=f"block_size.*{block_size}") as caught:
            load_cpu_engine(source, num_blocks=4, block_size=block_size)
        assert caught.value.field == "block_size"
    with pytest.raises(ConfigError, match="num_blocks"):
        load_cpu_engine(source, num_blocks=10**9)


def test_a_cpu_worker_does_not_import_torch(models: Path) -> None:
    """Resident memory, start-up time and the light install depend on it."""
    directory = models / "head_dim 32, tied"
    source_of(models, "head_dim 32, tied")
    script = (
        "import sys, json\n"
        "from pdserve.testing.cpu_digest import digest_of\n"
        "digest = digest_of(sys.argv[1])\n"
        "print(json.dumps([digest, sorted({'torch', 'transformers', 'scipy'} & set(sys.modules))]))\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(directory)], capture_output=True, text=True, check=True)
    digest, imported = json.loads(result.stdout)
    assert imported == []
    assert digest == digest_of(str(directory))
    assert len(digest) == hashlib.sha256().digest_size * 2


SERVE = """
import json, sys
from pdserve.engine.batch import SampleRequest, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.cpu import draw, entry, rendezvous, step
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import open_model
from pdserve.testing.reference import generate
from pdserve.types import SamplingParams

kernels = (step.step, step.head, entry.prepare, draw.greedy, draw.draw, rendezvous.wait_for)
engine = load_cpu_engine(open_model(sys.argv[1]), num_blocks=40, num_threads=2)
loaded = [len(kernel.signatures) for kernel in kernels]
sampling = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(top_k=9, top_p=0.5)]
generate(engine, [[1, 2, 3], [4], [5] * 40], 4, sampling=sampling, budget_tokens=16)
request = SampleRequest(params=sampling[2], num_logprobs=3, forbidden_token_ids=(1, 2))
score = ScoreRequest(target_ids=[7, 8], num_top=2)
chunk = SequenceChunk(token_ids=[6, 7, 8], start_position=0, block_table=[0], samples=(request,), score=score)
batch = build_batch([chunk], 16)
engine.forward(batch)
engine.forward_logits(batch)
print(json.dumps([loaded, [len(kernel.signatures) for kernel in kernels]]))
"""


def test_serving_compiles_nothing_that_loading_has_not(models: Path) -> None:
    """A request that met an uncompiled kernel would wait for it, and everybody else with it."""
    source_of(models, "head_dim 32, tied")
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(models / "head_dim 32, tied")], capture_output=True, text=True, check=True
    )
    loaded, served = json.loads(result.stdout)
    assert loaded == served == [1, 1, 1, 1, 1, 1]


def test_the_engine_satisfies_the_protocol(models: Path) -> None:
    engine = load_cpu_engine(source_of(models, "head_dim 32, tied"), num_blocks=4)
    protocol: Engine = engine
    assert isinstance(protocol, CpuEngine)
    assert (protocol.num_blocks, protocol.layout.dtype, protocol.layout.block_size) == (4, "float16", 16)
    assert protocol.store.layout == protocol.layout
