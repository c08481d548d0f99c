"""From the configuration to a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import Config
from pdserve.config.schema import EngineSection
from pdserve.core_ledger import CoreLedger
from pdserve.cpus import available_cpus
from pdserve.engine.engine import Engine
from pdserve.engine.loader import load_engine
from pdserve.engine.select import why_not_cpu
from pdserve.errors import ConfigError
from pdserve.model.source import open_model
from pdserve.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """An engine and what its worker tells others about it."""

    engine: Engine
    name: str
    """Name under which the model is served unless the configuration has another."""
    fingerprint: str
    """Digest of configuration and weights."""


EngineFactory = Callable[[Config], LoadedModel]
"""Called once, on the engine's thread. Raises PdServeError."""


def load_model(config: Config) -> LoadedModel:
    """Load what `model`, `engine` and `kv` of the configuration ask for. Raises ModelLoadError or ConfigError."""
    source = open_model(config.model.path)
    settings = config.engine
    num_blocks = config.kv.num_blocks
    kv_cache_bytes = None if num_blocks is not None else config.kv.pool_bytes
    obstacle = why_not_cpu(source.config, device=settings.device, block_size=config.kv.block_size)
    if settings.kind == "cpu" and obstacle is not None:
        raise ConfigError(f"engine.kind: cpu cannot be used: {obstacle}; use torch or auto", field="engine.kind")
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
        )
    else:
        for name, ignored in (("dtype", settings.dtype != "float32"), ("attention", settings.attention != "sdpa")):
            if ignored:
                log.warning("engine.%s has no effect on the CPU engine; it is for engine.kind: torch", name)
        # Imports numba, which a worker on another engine need not wait for.
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
        )
    return LoadedModel(engine=engine, name=source.name, fingerprint=source.fingerprint)


def _core_ledger(settings: EngineSection) -> CoreLedger | None:
    if settings.core_ledger is None:
        return None
    cores = available_cpus()
    ledger = settings.core_ledger
    return CoreLedger(Path(ledger.file), ledger.slot, share=settings.threads or cores, num_cores=cores)


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
