"""From the configuration to a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config import Config
from pdserve.engine.engine import Engine
from pdserve.engine.loader import load_engine
from pdserve.errors import ConfigError
from pdserve.model.source import open_model


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
    engine = load_engine(
        source,
        device=config.engine.device,
        dtype=config.engine.dtype,
        num_blocks=config.kv.num_blocks,
        kv_cache_bytes=None if config.kv.num_blocks is not None else config.kv.pool_bytes,
        block_size=config.kv.block_size,
        attention=config.engine.attention,
        num_threads=config.engine.threads,
    )
    return LoadedModel(engine=engine, name=source.name, fingerprint=source.fingerprint)


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
