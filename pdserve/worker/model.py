"""From the configuration to a loaded model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdserve.config import Config
from pdserve.config.schema import EngineSection
from pdserve.core_ledger import CoreLedger
from pdserve.cpus import available_cpus
from pdserve.engine.engine import Engine
from pdserve.engine.loader import load_engine
from pdserve.engine.parallel.loader import load_parallel_engine
from pdserve.engine.select import why_not_cpu
from pdserve.engine.sizes import StepLimits
from pdserve.errors import ConfigError
from pdserve.model.endless import with_window
from pdserve.model.source import ModelSource, open_model
from pdserve.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


class EngineGroup(Protocol):
    """The processes of one engine, that of the worker among them."""

    @property
    def size(self) -> int:
        """How many."""

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Call with the reason, once, on any thread, when one of them has ended; at once if one has."""

    def close(self) -> None:
        """End the others, and wait for that. Blocks; the engine is not used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """An engine and what its worker tells others about it."""

    engine: Engine
    name: str
    """Name under which the model is served unless the configuration has another."""
    fingerprint: str
    """Digest of configuration and weights."""
    draft: Engine | None = None
    """Of the model that drafts for it, with as many blocks."""
    group: EngineGroup | None = None
    """The processes of an engine that has several; whoever has it loaded closes it."""


KV_DTYPES = {"auto": None, "int8": "int8", "fp8": "float8_e4m3"}
"""By `kv.dtype`: dtype of the pool, None for what the engine takes by itself."""

EngineFactory = Callable[[Config], LoadedModel]
"""Called once, on the engine's thread. Raises PdServeError."""


def load_model(config: Config, *, decodes: bool = False, beside: Engine | None = None) -> LoadedModel:
    """Load what `model`, `engine` and `kv` of the configuration ask for. Raises ModelLoadError or ConfigError.

    `decodes` says whether it is for a decode worker, which has other steps than a prefill worker. `beside` is an engine
    of the same configuration that computes on the same thread, in turns with this one.
    """
    source = open_served_model(config)
    if config.engine.tensor_parallel > 1:
        return _load_parallel(config, source, decodes=decodes)
    settings = config.engine
    num_blocks = config.kv.num_blocks
    fraction = config.kv.gpu_memory_fraction
    kv_cache_bytes = None if num_blocks is not None or fraction is not None else config.kv.pool_bytes
    kv_dtype = KV_DTYPES[config.kv.dtype]
    obstacle = why_not_cpu(source.config, device=settings.device, block_size=config.kv.block_size)
    if settings.kind == "cpu" and obstacle is not None:
        raise ConfigError(f"engine.kind: cpu cannot be used: {obstacle}; use torch or auto", field="engine.kind")
    if config.kv.dtype == "fp8" and settings.kind == "auto" and obstacle is None:
        # Ten times slower here than the other engine: not something to choose for somebody.
        raise ConfigError("kv.dtype: fp8 needs engine.kind: torch; the CPU engine has int8", field="kv.dtype")
    engine: Engine
    if settings.kind == "torch" or obstacle is not None:
        if obstacle is not None and settings.device == "cpu":
            log.warning("using the torch engine: %s", obstacle)
        engine = load_engine(
            source,
            device=settings.device,
            dtype=settings.dtype,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            block_size=config.kv.block_size,
            attention=settings.attention,
            num_threads=settings.threads,
            gpu_memory_fraction=fraction,
            limits=_step_limits(config, decodes),
            graph_tokens=_decode_rows(config) if decodes and settings.cuda_graphs else 0,
            kv_dtype=kv_dtype,
            beside=beside,
        )
    else:
        for name, ignored in (("dtype", settings.dtype != "float32"), ("attention", settings.attention != "auto")):
            if ignored:
                log.warning("engine.%s has no effect on the CPU engine; it is for engine.kind: torch", name)
        # Imports numba, which a worker on another engine need not wait for.
        from pdserve.engine.cpu.engine import CpuEngine
        from pdserve.engine.cpu.loader import load_cpu_engine

        engine = load_cpu_engine(
            source,
            weights=settings.weights,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            block_size=config.kv.block_size,
            num_threads=settings.threads,
            cores=_core_ledger(settings),
            # What `auto` is has been decided by who started several workers; alone it means no.
            pin_threads=False if settings.pin_threads == "auto" else settings.pin_threads,
            kv_dtype=kv_dtype,
            beside=beside if isinstance(beside, CpuEngine) else None,
        )
    return LoadedModel(engine=engine, name=source.name, fingerprint=source.fingerprint)


def _load_parallel(config: Config, source: ModelSource, *, decodes: bool) -> LoadedModel:
    """A worker of several processes. Raises ModelLoadError or ConfigError."""
    settings, field = config.engine, "engine.tensor_parallel"
    if settings.kind == "cpu":
        raise ConfigError(f"{field}: the CPU engine is one process; use engine.kind: torch or auto", field=field)
    if decodes and config.decode.speculation.uses_draft_model:
        raise ConfigError(
            f"{field}: a draft model runs beside a model of one process only; leave out decode.speculation.draft_model",
            field=field,
        )
    if settings.pin_threads not in ("auto", False):
        log.warning("engine.pin_threads has no effect on the torch engine")
    num_blocks = config.kv.num_blocks
    loaded = load_parallel_engine(
        source,
        settings.tensor_parallel,
        device=settings.device,
        dtype=settings.dtype,
        num_blocks=num_blocks,
        kv_cache_bytes=None if num_blocks is not None else config.kv.pool_bytes,
        block_size=config.kv.block_size,
        attention=settings.attention,
        num_threads=settings.threads,
        timeout_s=settings.tensor_parallel_timeout_s,
        log=config.log,
        name=f"worker-{os.getpid()}",
        kv_dtype=KV_DTYPES[config.kv.dtype],
    )
    return LoadedModel(engine=loaded.engine, name=source.name, fingerprint=source.fingerprint, group=loaded.group)


PROMPTS_PER_STEP = 256
"""Prompts of which a prefill step may draw tokens that memory is kept for; more are short ones."""


def _step_limits(config: Config, decodes: bool) -> StepLimits:
    """The largest steps of a worker."""
    if decodes:
        return StepLimits(max_tokens=config.decode.max_batch_tokens, max_rows=_decode_rows(config))
    max_tokens = config.prefill.max_batch_tokens
    return StepLimits(max_tokens=max_tokens, max_rows=min(max_tokens, PROMPTS_PER_STEP))


def _decode_rows(config: Config) -> int:
    """Tokens that a decode step draws at most: one for each sequence, or of few sequences those of drafts as well."""
    speculation = config.decode.speculation
    if speculation.method == "off":
        return config.decode.max_batch_size
    drafting = min(config.decode.max_batch_size, speculation.max_batch_size)
    return max(config.decode.max_batch_size, drafting * (1 + speculation.max_draft_tokens))


def _core_ledger(settings: EngineSection) -> CoreLedger | None:
    if settings.core_ledger is None:
        return None
    cores = available_cpus()
    ledger = settings.core_ledger
    return CoreLedger(Path(ledger.file), ledger.slot, share=settings.threads or cores, num_cores=cores)


def open_served_model(config: Config) -> ModelSource:
    """The configured model, with the window that the configuration gives it. Raises ModelLoadError or ConfigError."""
    engine = config.engine
    source = open_model(config.model.path)
    return with_window(source, engine.attention_window, engine.attention_sinks, config.model.max_model_len)


def load_model_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the configured model. Raises ModelLoadError. Workers know token ids only; whoever follows the
    text of an output needs more, and is rare enough to open the model once more."""
    return load_tokenizer(open_model(config.model.path))


def max_model_len(config: Config, engine: Engine) -> int:
    """Longest sequence in tokens. Raises ConfigError if the configuration asks for more than the model can do."""
    limit = engine.config.max_position_embeddings
    wanted = config.model.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"model.max_model_len: {wanted} is more than the {limit} tokens the model was trained for",
            field="model.max_model_len",
        )
    return limit if wanted is None else wanted
