"""A decode worker's model together with the small one that drafts for it."""

from __future__ import annotations

import logging
from dataclasses import replace

from pdserve.config import Config
from pdserve.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.source import ModelSource, open_model
from pdserve.tokenizer import load_tokenizer
from pdserve.worker.model import LoadedModel, load_model

log = logging.getLogger(__name__)

FIELD = "decode.speculation.draft_model"


def load_decode_model(config: Config) -> LoadedModel:
    """As `load_model`, with the draft model if the configuration has one. `kv.pool_bytes` is for both pools, which have
    the same number of blocks. Raises ModelLoadError or ConfigError."""
    path = config.decode.speculation.draft_model
    if path is None or not config.decode.speculation.uses_draft_model:
        return load_model(config, decodes=True)
    source, draft_source = open_model(config.model.path), open_model(path)
    check_draft_model(source, draft_source)
    kv = config.kv
    if kv.num_blocks is None:
        has_scales = kv.dtype != "auto"
        own, drafts = _kv_width(source.config, has_scales), _kv_width(draft_source.config, has_scales)
        kv = kv.model_copy(update={"pool_bytes": max(1, kv.pool_bytes * own // (own + drafts))})
    loaded = load_model(config.model_copy(update={"kv": kv}), decodes=True)
    layout, num_blocks = loaded.engine.layout, loaded.engine.num_blocks
    if loaded.engine.config.kv_window.size:
        raise ConfigError(
            f"{FIELD}: not with {config.model.path}: where every layer has an attention window, blocks behind it are "
            "given up, in which the draft model has its KV as well; leave it out",
            field=FIELD,
        )
    drafting = load_model(
        config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": path}),
                "kv": config.kv.model_copy(update={"num_blocks": num_blocks}),
            }
        ),
        decodes=True,
        beside=loaded.engine,
    )
    if drafting.engine.layout.dtype != layout.dtype:
        raise ConfigError(
            f"{FIELD}: {path} has KV of {drafting.engine.layout.dtype} and {config.model.path} of {layout.dtype}: they "
            "run on different engines; set engine.kind to torch for both, or take another draft model",
            field=FIELD,
        )
    nbytes = num_blocks * drafting.engine.layout.block_nbytes
    log.info("draft model loaded", extra={"model": drafting.name, "blocks": num_blocks, "kv_bytes": nbytes})
    return replace(loaded, draft=drafting.engine)


def check_draft_model(source: ModelSource, draft_source: ModelSource) -> None:
    """Raise ConfigError, with the reason, for a model that cannot draft for `source`; ModelLoadError if one of them has
    no tokenizer."""
    vocabulary, drafted = load_tokenizer(source), load_tokenizer(draft_source)
    problem = None
    rows, drafted_rows = source.config.vocab_size, draft_source.config.vocab_size
    if rows != drafted_rows:
        problem = f"it has {drafted_rows} rows of logits, the model {rows}"
    elif vocabulary.vocab_size != drafted.vocab_size:
        problem = f"it has {drafted.vocab_size} tokens, the model {vocabulary.vocab_size}"
    else:
        pairs = ((i, vocabulary.id_to_piece(i), drafted.id_to_piece(i)) for i in range(vocabulary.vocab_size))
        different = next(((i, ours, theirs) for i, ours, theirs in pairs if ours != theirs), None)
        if different is not None:
            problem = f"its token {different[0]} is {different[2]!r}, the model's {different[1]!r}"
    if problem is not None:
        raise ConfigError(f"{FIELD}: a draft model needs the same vocabulary: {problem}", field=FIELD)


def _kv_width(config: ModelConfig, has_scales: bool) -> int:
    """What the KV of one token takes of a pool, for comparison: numbers, or bytes where they have scales of 16 bits."""
    return 2 * config.num_layers * config.num_kv_heads * (config.head_dim + (2 if has_scales else 0))
