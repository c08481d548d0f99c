"""What a window and sinks do to a model that has no window: perplexity by position, far beyond the trained length.

A small byte-level Llama is trained here on the reference manual that comes with Python, at a length of 256 tokens, and
reads 1,024 tokens of chapters that it has not seen: with all of it in view, and with `engine.attention_window`, with
and without sinks. The same for SmolLM2-135M-Instruct within its context, where sinks make the difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import numpy as np

from benchmarks.harness.report import Report
from pdserve.engine.batch import ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.endless import with_window
from pdserve.model.source import ModelSource, open_model
from pdserve.tokenizer import load_tokenizer

View = tuple[int | None, int]
"""Window and sinks; None is everything."""

TRAINED, LENGTH, BUCKET = 256, 1024, 128
STEPS, QUICK_STEPS = 300, 5
"""Of training."""
NUM_TEXTS: Final = 8
VIEWS: Final[Mapping[str, View]] = {"full": (None, 0), "window": (192, 0), "window+sinks": (188, 4)}
CHUNK: Final = 256
SMOL_VIEWS: Final[Mapping[str, View]] = {"full": (None, 0), "window": (256, 0), "window+sinks": (252, 4)}
SMOL_LENGTH, SMOL_TEXTS = 1024, 2


def train(directory: Path, text: bytes, steps: int, threads: int) -> None:
    """Write a checkpoint of a small model, trained on `text` with next-token cross-entropy and AdamW."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=TRAINED, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for _ in range(steps):
        begins = torch.randint(0, len(ids) - TRAINED - 1, (8,)).tolist()
        batch = torch.stack([ids[b : b + TRAINED] for b in begins])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(directory)


def losses(source: ModelSource, texts: list[list[int]], threads: int) -> np.ndarray[Any, Any]:
    """Nats of each token but the first: [texts, tokens - 1]."""
    length = len(texts[0])
    engine = load_cpu_engine(source, weights="auto", num_blocks=-(-length // 16), num_threads=threads)
    rows = []
    for tokens in texts:
        row: list[float] = []
        for begin in range(0, length, CHUNK):
            chunk = SequenceChunk(
                token_ids=tokens[begin : begin + CHUNK],
                start_position=begin,
                block_table=list(range(engine.num_blocks)),
                score=ScoreRequest(target_ids=tokens[begin + 1 : begin + CHUNK + 1], num_top=0),
            )
            scored = engine.forward(build_batch([chunk], 16)).prompt_logprobs
            assert scored is not None
            row += (-scored.logprobs).tolist()
        rows.append(row)
    return np.array(rows)


def curves(
    report: Report, name: str, source: ModelSource, texts: list[list[int]], views: Mapping[str, View], threads: int
) -> None:
    """Perplexity of each view in each stretch of BUCKET tokens."""
    for view, (window, sinks) in views.items():
        nats = losses(with_window(source, window, sinks, len(texts[0])), texts, threads)
        stretches = [nats[:, b : b + BUCKET] for b in range(0, nats.shape[1], BUCKET)]
        curve = [float(np.exp(stretch.mean())) for stretch in stretches]
        report.samples[f"{name} {view}"] = {str((i + 1) * BUCKET): round(p, 3) for i, p in enumerate(curve)}
        note = "by stretch: " + " ".join(f"{p:.2f}" for p in curve)
        report.add(f"{name}_{view}_perplexity_at_{len(texts[0])}", curve[-1], "", note=note)


def run(report: Report, *, threads: int, quick: bool) -> None:
    """Train, read, report."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    split = len(text) * 4 // 5
    with tempfile.TemporaryDirectory() as directory:
        train(Path(directory), text[:split], QUICK_STEPS if quick else STEPS, threads)
        source = open_model(directory)
        step = (len(text) - split - LENGTH) // NUM_TEXTS
        texts = [list(text[split + i * step :][:LENGTH]) for i in range(NUM_TEXTS)]
        # So that `full` has angles for all positions.
        beyond = source.with_config(replace(source.config, max_position_embeddings=LENGTH))
        curves(report, "tiny", beyond, texts[:1] if quick else texts, VIEWS, threads)
    if quick:
        return
    source = open_model("smollm2-135m-instruct")
    ids = load_tokenizer(source).encode(text[split:].decode("utf-8", "replace"))
    texts = [ids[i * SMOL_LENGTH : (i + 1) * SMOL_LENGTH] for i in range(SMOL_TEXTS)]
    curves(report, "smollm2", source, texts, SMOL_VIEWS, threads)
