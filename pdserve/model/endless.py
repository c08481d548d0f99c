"""A model without a window, served with one: streams that may go on for ever in bounded memory.

After Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023): models put what attention they
have no use for on the first tokens, and fail once these are gone. So every layer sees a window and the first tokens.

Positions: keys keep the rotary angle of their place in the text, and so does a query towards the keys of its window,
from which it is less than the window away. Towards the sinks it has the angle of position sinks + window - 1 at most.
That is what it would have if the text between them and the window were cut out, and no distance is longer than those
that the model was trained for.
"""

from __future__ import annotations

from dataclasses import replace

from pdserve.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.source import ModelSource


def with_window(source: ModelSource, window: int | None, sinks: int, max_model_len: int | None) -> ModelSource:
    """`source`, with a window of so many tokens in every layer and as many leading tokens that stay visible, for texts
    of up to `max_model_len` tokens; None is what the model was trained for. As it is without a `window`.

    Raises ConfigError for a model that has windows of its own, or a window that is longer than the model's context.
    """
    if window is None:
        return source
    config, field = source.config, "engine.attention_window"
    if config.layer_windows:
        raise ConfigError(f"{field}: {source.name} has a window of its own; leave this setting out", field=field)
    if window + sinks > config.max_position_embeddings:
        raise ConfigError(
            f"{field}: {window} tokens and {sinks} sinks are more than the {config.max_position_embeddings} tokens "
            f"that {source.name} was trained for",
            field=field,
        )
    longest = max(config.max_position_embeddings, max_model_len or 0)
    return source.with_config(_windowed(config, window, sinks, longest))


def _windowed(config: ModelConfig, window: int, sinks: int, longest: int) -> ModelConfig:
    windows = (window,) * config.num_layers
    return replace(config, layer_windows=windows, attention_sinks=sinks, max_position_embeddings=longest)
